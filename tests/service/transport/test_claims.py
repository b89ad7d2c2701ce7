"""Which requests are answered on gRPC's own thread, and that nothing else has to wait for them there."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

import grpc
import numpy as np
import pytest
from loopback import Gate, LoopbackModel, Served, infer_request, serving, until

from bf16kit.protocol import inference_pb2 as pb
from service.contract import Array

X = np.ones((1, 3), np.float32)


class Threads:
    """A run that remembers the threads that it was called on, and takes ``seconds`` of their time."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.names: list[str] = []
        self.seconds = seconds

    def __call__(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        self.names.append(threading.current_thread().name)
        begun = time.thread_time()
        while time.thread_time() < begun + self.seconds:
            pass
        return {"y": np.array(feeds["x"])}

    @property
    def on_grpc(self) -> bool:
        """Whether the last was gRPC's own."""
        return "_serve" in self.names[-1]


def answered_on_grpc(served: Served, run: Threads, message: pb.ModelInferRequest) -> bool:
    """Whether one of some calls was, which come one after the other."""

    def one() -> bool:
        served.call("ModelInfer", message)
        return run.on_grpc

    return any(one() for _ in range(50))


def test_a_quick_model_is_answered_on_grpcs_own_thread() -> None:
    run = Threads()
    with serving(LoopbackModel(run=run, inline=True)) as served:
        assert answered_on_grpc(served, run, infer_request(x=X))
        assert served.call("ModelInfer", infer_request(x=X)).outputs[0].shape == [1, 3]
        until(lambda: served.transport._inference._shares.taken == 0)


def test_a_slow_model_never_is() -> None:
    run = Threads(seconds=2e-3)
    with serving(LoopbackModel(run=run, inline=True)) as served:
        assert not answered_on_grpc(served, run, infer_request(x=X))


def test_a_large_request_never_is() -> None:
    run = Threads()
    with serving(LoopbackModel(run=run, inline=True, max_batch_size=1024)) as served:
        assert answered_on_grpc(served, run, infer_request(x=X))
        assert not answered_on_grpc(served, run, infer_request(x=np.ones((400, 3), np.float32)))


def test_what_is_refused_there_gives_its_claim_back() -> None:
    """A dtype that is wrong, a model that is unknown: the next request is answered there again."""
    run = Threads()
    wrong, unknown = infer_request(x=X.astype(np.float64)), infer_request("nobody", x=X)
    with serving(LoopbackModel(run=run, inline=True)) as served:
        assert answered_on_grpc(served, run, infer_request(x=X))
        for _ in range(3):
            assert served.refusal("ModelInfer", wrong)[0] is grpc.StatusCode.INVALID_ARGUMENT
            assert served.refusal("ModelInfer", unknown)[0] is grpc.StatusCode.NOT_FOUND
        assert answered_on_grpc(served, run, infer_request(x=X))


def test_a_quick_model_that_is_at_work_keeps_nobody_waiting_on_that_thread() -> None:
    """Its request waits in the queue on a thread of its own, and a probe is answered meanwhile."""
    run, gate = Threads(), Gate()
    model = LoopbackModel(run=run, inline=True)
    with serving(model) as served:
        assert answered_on_grpc(served, run, infer_request(x=X))
        slow = Threads(seconds=2e-3)
        model._run = slow
        until(lambda: not answered_on_grpc(served, slow, infer_request(x=X)))
        model._run = gate
        held = served.stub("ModelInfer").future(infer_request(x=X))
        assert gate.started.wait(30)
        model._run = run
        waiting = served.stub("ModelInfer").future(infer_request(x=X))
        assert served.call("ServerLive", pb.ServerLiveRequest()).live
        assert not waiting.done()
        gate.go.set()
        assert held.result(30).outputs
        assert waiting.result(30).outputs


def test_executors_alone_run_a_model_whose_runtime_keeps_memory_per_thread() -> None:
    run = Threads()
    with serving(LoopbackModel(run=run)) as served:
        assert not answered_on_grpc(served, run, infer_request(x=X))
        assert "executor" in run.names[-1]


@pytest.mark.parametrize("calls", [200])
def test_every_one_of_many_at_once_is_answered(calls: int) -> None:
    run = Threads()
    with serving(LoopbackModel(run=run, inline=True), max_in_flight=1024) as served:
        assert answered_on_grpc(served, run, infer_request(x=X))
        futures = [served.stub("ModelInfer").future(infer_request(x=X)) for _ in range(calls)]
        assert all(future.result(60).outputs for future in futures)
        until(lambda: served.transport._inference._shares.taken == 0)


def test_a_request_that_takes_long_though_it_is_small_never_is() -> None:
    """With tensors in shared memory there are megabytes to read, with classes strings to make."""
    run = Threads()
    with serving(LoopbackModel(run=run, inline=True)) as served:
        assert answered_on_grpc(served, run, infer_request(x=X))
        message = infer_request(x=X)
        message.inputs[0].parameters["shared_memory_region"].string_param = "r"
        assert served.transport._servicer.claim(message.SerializeToString()) is None
        message = infer_request(x=X)
        message.outputs.add(name="y").parameters["classification"].int64_param = 1
        assert served.transport._servicer.claim(message.SerializeToString()) is None
