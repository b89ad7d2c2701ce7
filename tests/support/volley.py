"""Send many attempts of :mod:`messages` to a server, several at a time, with valid requests between them."""

import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
import messages
from messages import Attempt, Valid

from bf16kit.artifact.artifact import Artifact
from bf16kit.numerics.tensors import BY_NAME
from bf16kit.protocol import inference_pb2 as pb
from bf16kit.runtime import Runtime
from bf16kit.runtime.loading import load
from bf16kit.service.wire.tensors import encode_raw, widen

CALLERS = 8
EVERY = 20  # attempts between two valid requests
LONGEST_DETAILS = 500  # characters
HANGS_S = 20.0
_NEVER = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]


class Oracle:
    """Computes the expected response to a valid request, with the same artifacts loaded in this process."""

    def __init__(self, repository: Path) -> None:
        self._runtimes: Mapping[str, Runtime] = {
            directory.name: load(Artifact.open(directory / "1"), "cpu", threads=1) for directory in repository.iterdir()
        }

    def answer(self, valid: Valid) -> list[bytes]:
        runtime = self._runtimes[valid.model]
        native = {spec.name: BY_NAME[spec.dtype].numpy for spec in runtime.inputs}
        feeds = {name: a if a.dtype == native[name] else widen(a) for name, a in valid.feeds.items()}
        found = runtime.run(feeds)
        return [encode_raw(BY_NAME[spec.dtype], found[spec.name]) for spec in runtime.outputs]


class Volley:
    """``wrong`` lists failures, with the number that reproduces each one. ``codes`` counts the calls by status."""

    def __init__(self, address: str, oracle: Oracle, first: int = 0) -> None:
        self.codes: Counter[str] = Counter()
        self.by_rpc: dict[str, Counter[str]] = {}
        self.messages = self.valid = 0
        self.slowest = 0.0
        self.wrong: list[str] = []
        self._address = address
        self._oracle = oracle
        self._numbers = itertools.count(first)
        self._lock = threading.Lock()

    def fire(self, count: int) -> None:
        """Send at least ``count`` messages. Stop early after 20 failures."""
        threads = [threading.Thread(target=self._call, args=(count,)) for _ in range(CALLERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _call(self, count: int) -> None:
        with grpc.insecure_channel(self._address, options=_OPTIONS) as channel:
            while self.messages < count and len(self.wrong) < 20:
                number = next(self._numbers)
                attempt, started = messages.attempt(number), time.monotonic()
                code, details = _outcome(channel, attempt)
                self._note(attempt, code, details, time.monotonic() - started)
                if number % EVERY == 0:
                    self._send_valid(channel, number)

    def _note(self, attempt: Attempt, code: grpc.StatusCode, details: str, seconds: float) -> None:
        about = f"{attempt.number} {attempt.path}: {code.name} {details[:200]!r}"
        with self._lock:
            self.messages += len(attempt.messages)
            self.codes[code.name] += 1
            self.by_rpc.setdefault(attempt.path.split("/")[-1], Counter())[code.name] += 1
            self.slowest = max(self.slowest, seconds)
            if code in _NEVER or "incident" in details:
                self.wrong.append(about)
            elif len(details) > LONGEST_DETAILS:
                self.wrong.append(f"{about}: {len(details)} characters of details")
            elif seconds > HANGS_S:
                self.wrong.append(f"{about}: after {seconds:.1f} s")

    def _send_valid(self, channel: grpc.Channel, number: int) -> None:
        """Send a valid request, raw or typed. Its response must have the same bits as the oracle's."""
        valid = messages.valid(number)
        call: Any = channel.unary_unary(messages.INFER, response_deserializer=pb.ModelInferResponse.FromString)
        problem = ""
        try:
            response = call(valid.message.SerializeToString(), timeout=2 * HANGS_S)
            if list(response.raw_output_contents) != self._oracle.answer(valid):
                problem = "is answered with other bits"
        except grpc.RpcError as error:
            problem = f"{error.code()} {error.details()!r}"
        with self._lock:
            self.valid += 1
            if problem:
                self.wrong.append(f"valid request {number} for {valid.model}: {problem}")


def _outcome(channel: grpc.Channel, attempt: Attempt) -> tuple[grpc.StatusCode, str]:
    """Make a call. Return its status code and its longest error text; an inference stream has errors in responses."""
    call: Any = channel.stream_stream(attempt.path)
    texts = [""]
    try:
        responses = call(iter(attempt.messages), metadata=attempt.metadata, timeout=2 * HANGS_S)
        if attempt.path == messages.WATCH:
            next(responses)
            responses.cancel()
        elif attempt.path == messages.STREAM:
            texts += [pb.ModelStreamInferResponse.FromString(data).error_message for data in responses]
        else:
            deque(responses, maxlen=0)
    except grpc.RpcError as error:
        return error.code(), max(*texts, error.details() or "", key=len)
    return grpc.StatusCode.OK, max(texts, key=len)
