"""Clients that send requests whatever happens, and record the outcome of each request by its id."""

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

_PAUSE = 0.05  # seconds after a failure: real clients do not retry without a pause
#: The gRPC configuration of a careful client: wait for a connection, and retry rejected requests.
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
                # gRPC cancels calls that arrive at the moment it stops, and the server never sees them. Inference has
                # no side effects, so a client may always send a request again.
                "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
            },
        }
    ]
}


def sentence() -> list[triton.InferInput]:
    """Return a short sentence as inputs for MiniLM."""
    ids = np.array([[101, 7592, 2088, 102]])
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    inputs = []
    for name, value in feeds.items():
        inputs.append(triton.InferInput(name, list(value.shape), "INT64"))
        inputs[-1].set_data_from_numpy(value)
    return inputs


class SteadyLoad:
    """Run clients while the block runs, each with its own connection.

    The ``plain`` ones use gRPC's defaults, the ``patient`` ones :data:`PATIENT`. A request's id begins with the kind of
    its client.
    """

    def __init__(self, target: str, *, plain: int, patient: int, model: str = "minilm") -> None:
        self._target = target
        self._model = model
        self._end = threading.Event()
        self._lock = threading.Lock()
        self.answered: set[str] = set()
        self.failed: dict[str, str] = {}  # status by request id
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
        """Return the number of successful requests of each client."""
        with self._lock:
            return Counter(name.rpartition("/")[0] for name in self.answered)

    def more(self) -> Callable[[], bool]:
        """Return a function that reports whether each client has had 20 successful requests since this call."""
        before = self.count()
        return lambda: all((self.count() - before)[thread.name] >= 20 for thread in self._threads)

    def _ask(self, name: str) -> None:
        # Each channel has a unique argument: channels with equal arguments share a connection.
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
