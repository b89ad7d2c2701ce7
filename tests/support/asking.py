"""Clients for tests that change a server's artifacts: one that sends requests continuously, and a single request."""

import threading
import time
from collections import Counter
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import grpc
import numpy as np
from loopback import infer_request
from waiting import until
from workerprocesses import Client

from bf16kit.numerics.tensors import Array

_PAUSE_S = 0.002
PATIENCE_S = 10.0  # the deadline of one request


def code_of(target: str, model: str, feeds: Mapping[str, Array]) -> str:
    """Send one request and return the name of its status."""
    with Client(target) as client:
        try:
            client.call("ModelInfer", infer_request(model, **dict(feeds)), PATIENCE_S)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


class RequestLoop:
    """A client that sends one request over and over in a thread. Use as a context manager.

    ``expected`` has the correct contents of a response by name. ``answered`` counts the responses by that name,
    incorrect ones as "". ``wrong`` describes each incorrect response, ``codes`` counts the statuses, and ``slowest`` is
    the longest time of a request in seconds.
    """

    def __init__(self, target: str, model: str, feeds: Mapping[str, Array], expected: Mapping[str, bytes]) -> None:
        self._target = target
        self._message = infer_request(model, **dict(feeds))
        self._expected = expected
        self.answered: Counter[str] = Counter()
        self.codes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.slowest = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send_requests, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join(60)

    def wait_for(self, answers: int) -> None:
        """Return when ``answers`` more requests have ended with the status OK."""
        enough = self.codes["OK"] + answers
        until(lambda: self.codes["OK"] >= enough, what=f"{answers} answers")

    def _send_requests(self) -> None:
        with Client(self._target) as client:
            call = client.ask("ModelInfer")
            while not self._stop.wait(_PAUSE_S):
                started = time.monotonic()
                try:
                    self._judge(b"".join(call(self._message, timeout=PATIENCE_S).raw_output_contents))
                    self.codes["OK"] += 1
                except grpc.RpcError as error:
                    self.codes[error.code().name] += 1
                self.slowest = max(self.slowest, time.monotonic() - started)

    def _judge(self, found: bytes) -> None:
        name = next((name for name, expected in self._expected.items() if found == expected), "")
        self.answered[name] += 1
        if not name:
            self.wrong.append(f"{len(found)} bytes, which begin with {np.frombuffer(found[:16], np.float32).tolist()}")
