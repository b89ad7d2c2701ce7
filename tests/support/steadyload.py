"""Clients that go on asking whatever happens, and remember what became of each request, by its id."""

from __future__ import annotations

import json
import threading
import uuid
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Self

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

_PAUSE = 0.05  # seconds after a failure: nobody asks a server that is away as fast as it can
#: What a careful client says to gRPC: wait until there is a connection, and try again what was refused.
PATIENT = {
    "methodConfig": [
        {
            "name": [{"service": "inference.GRPCInferenceService"}],
            "waitForReady": True,
            "timeout": "60s",
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.5s",
                "maxBackoff": "8s",
                "backoffMultiplier": 2,
                # gRPC cancels what arrives at the moment it is stopped, and the server never hears of it. Inference
                # changes nothing: whatever became of a request, it may be sent again.
                "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
            },
        }
    ]
}


def sentence() -> list[triton.InferInput]:
    """A short sentence for MiniLM."""
    ids = np.array([[101, 7592, 2088, 102]])
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    inputs = []
    for name, value in feeds.items():
        inputs.append(triton.InferInput(name, list(value.shape), "INT64"))
        inputs[-1].set_data_from_numpy(value)
    return inputs


class SteadyLoad:
    """``plain`` clients of gRPC's defaults and ``patient`` ones, each with a connection of its own, for as long as the
    block lasts. A request's id begins with the kind of its client."""

    def __init__(self, target: str, *, plain: int, patient: int, model: str = "minilm") -> None:
        self._target = target
        self._model = model
        self._end = threading.Event()
        self._lock = threading.Lock()
        self.answered: set[str] = set()
        self.failed: dict[str, str] = {}  # the status
        run = uuid.uuid4().hex[:8]
        kinds = ["plain"] * plain + ["patient"] * patient
        names = [f"{kind}-{run}-{number}" for number, kind in enumerate(kinds)]
        self._threads = [threading.Thread(target=self._ask, args=(name,), name=name) for name in names]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    def count(self) -> Counter[str]:
        """Answered requests by client."""
        with self._lock:
            return Counter(name.rpartition("/")[0] for name in self.answered)

    def more(self) -> Callable[[], bool]:
        """Tells whether each client has been answered again since now, 20 times."""
        before = self.count()
        return lambda: all((self.count() - before)[thread.name] >= 20 for thread in self._threads)

    def _ask(self, name: str) -> None:
        # An argument of its own each: channels with equal ones share a connection.
        channel: list[tuple[str, object]] = [("bf16kit.test.client", name), ("grpc.use_local_subchannel_pool", 1)]
        if name.startswith("patient"):
            channel.append(("grpc.service_config", json.dumps(PATIENT)))
        number = 0
        with triton.InferenceServerClient(self._target, channel_args=channel) as client:
            while not self._end.is_set():
                number += 1
                request = f"{name}/{number}"
                try:
                    client.infer(self._model, sentence(), request_id=request)
                except InferenceServerException as error:
                    with self._lock:
                        self.failed[request] = str(error.status())
                    self._end.wait(_PAUSE)
                else:
                    with self._lock:
                        self.answered.add(request)
