"""What a flooded model does to the others: nothing."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import grpc
import numpy as np
from loopback import LoopbackModel, Served, infer_request, serving, until

from service.contract import Array

X = np.ones((1, 3), np.float32)
_CONNECTIONS, _IN_FLIGHT = 10, 10  # fewer than half of the server's places
_QUEUE = 16  # requests; many fewer than are sent at once


def slow(feeds: Mapping[str, Array]) -> dict[str, Array]:
    time.sleep(0.01)
    return {"y": np.array(feeds["x"])}


@contextmanager
def flood(served: Served, model: str) -> Iterator[None]:
    """Send requests to ``model`` on many connections, another one as soon as one has been answered or rejected."""
    stopped, message = threading.Event(), infer_request(model, x=X)

    def keep_sending(client: Served) -> None:
        while not stopped.is_set():
            with contextlib.suppress(grpc.RpcError):
                client.call("ModelInfer", message)

    with contextlib.ExitStack() as stack:
        threads = []
        for _ in range(_CONNECTIONS):
            channel = grpc.insecure_channel(served.address, options=[("grpc.use_local_subchannel_pool", 1)])
            client = replace(served, channel=stack.enter_context(channel))
            threads += [threading.Thread(target=keep_sending, args=(client,)) for _ in range(_IN_FLIGHT)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stopped.set()
            for thread in threads:
                thread.join()


def test_an_idle_model_answers_every_request_while_another_model_rejects_most_of_its_own() -> None:
    models = LoopbackModel("flooded", run=slow, max_batch_size=1, max_queue=_QUEUE), LoopbackModel("idle")
    with serving(*models) as served, flood(served, "flooded"):
        until(lambda: served.log.seen.count(("flooded", 1, "RESOURCE_EXHAUSTED")) > 200)
        message = infer_request("idle", x=X)
        while served.log.seen.count(("flooded", 1, "OK")) < 300:  # three seconds
            assert served.call("ModelInfer", message).outputs[0].shape == [1, 3]
