"""Which requests are answered on gRPC's own thread, and that no other request waits for them there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import grpc
import numpy as np
import pytest
from loopback import Gate, LoopbackModel, Served, infer_request, serving, until

from bf16kit.protocol import inference_pb2 as pb
from service.contract import Array
from service.request import Claim, Request

X = np.ones((1, 3), np.float32)


class Threads:
    """A run that records the threads it is called on, and uses ``seconds`` of their CPU time."""

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
        """Whether the last call ran on gRPC's own thread."""
        return "_serve" in self.names[-1]


def answered_on_grpc(served: Served, run: Threads, message: pb.ModelInferRequest) -> bool:
    """Return whether at least one of 50 successive calls was answered on gRPC's own thread."""

    def one() -> bool:
        served.call("ModelInfer", message)
        return run.on_grpc

    return any(one() for _ in range(50))


def test_a_quick_model_is_answered_on_grpcs_own_thread() -> None:
    run = Threads()
    with serving(LoopbackModel(run=run, inline=True)) as served:
        assert answered_on_grpc(served, run, infer_request(x=X))
        assert served.call("ModelInfer", infer_request(x=X)).outputs[0].shape == [1, 3]
        until(lambda: served.transport._services.inference._shares.in_use == 0)


def test_a_slow_model_is_not_answered_on_grpcs_own_thread() -> None:
    run = Threads(seconds=2e-3)
    with serving(LoopbackModel(run=run, inline=True)) as served:
        assert not answered_on_grpc(served, run, infer_request(x=X))


def test_a_slow_larger_request_of_a_quick_model_is_not_answered_on_grpcs_own_thread() -> None:
    """The larger request is below the size limit of that thread, but has 80 times the rows of the quick requests."""

    class Growing(Threads):
        def __call__(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
            self.seconds = 2e-5 * len(feeds["x"])
            return super().__call__(feeds)

    run, large = Growing(), infer_request(x=np.ones((80, 3), np.float32))
    with serving(LoopbackModel(run=run, inline=True, max_batch_size=1024)) as served:
        for _ in range(3):  # the run times of one size do not count for the other
            assert answered_on_grpc(served, run, infer_request(x=X))
            assert not answered_on_grpc(served, run, large)


def test_a_large_request_is_not_answered_on_grpcs_own_thread() -> None:
    run = Threads()
    with serving(LoopbackModel(run=run, inline=True, max_batch_size=1024)) as served:
        assert answered_on_grpc(served, run, infer_request(x=X))
        assert not answered_on_grpc(served, run, infer_request(x=np.ones((400, 3), np.float32)))


def test_a_request_that_is_rejected_on_grpcs_own_thread_gives_its_claim_back() -> None:
    """After a wrong dtype or an unknown model, gRPC's own thread still answers the next request."""
    run = Threads()
    wrong, unknown = infer_request(x=X.astype(np.float64)), infer_request("nobody", x=X)
    with serving(LoopbackModel(run=run, inline=True)) as served:
        assert answered_on_grpc(served, run, infer_request(x=X))
        for _ in range(3):
            assert served.refusal("ModelInfer", wrong)[0] is grpc.StatusCode.INVALID_ARGUMENT
            assert served.refusal("ModelInfer", unknown)[0] is grpc.StatusCode.NOT_FOUND
        assert answered_on_grpc(served, run, infer_request(x=X))


def test_no_request_waits_for_a_running_model_on_grpcs_own_thread() -> None:
    """The next request waits in the queue on another thread, and a probe gets its response meanwhile."""
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


@pytest.fixture
def replaced() -> Iterator[tuple[Served, LoopbackModel, Callable[[], None], Gate]]:
    """Yield a quick model that serves, a function that replaces it by a busy one, and the gate that ends that run."""
    run, gate = Threads(), Gate()
    old, new = LoopbackModel(run=run, inline=True), LoopbackModel(run=gate, inline=True)
    with serving(old) as served:
        new.batcher.start()
        at_work = threading.Thread(target=new.infer, args=[Request({"x": X})])
        at_work.start()
        assert gate.started.wait(30)
        assert answered_on_grpc(served, run, infer_request(x=X))
        try:
            yield served, old, lambda: served.registry.replace(old, new), gate
        finally:
            gate.go.set()
            at_work.join()


def test_a_model_that_is_replaced_before_its_request_is_parsed_answers_it(
    replaced: tuple[Served, LoopbackModel, Callable[[], None], Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request keeps the model that it claimed.

    If it requested the model again, gRPC's thread would wait for the new model's run, and all calls for that thread.
    """
    served, old, replace, _ = replaced
    acquire = served.registry.acquire

    def acquire_and_replace(name: str, version: str) -> AbstractContextManager[LoopbackModel]:
        lease = acquire(name, version)
        if old in served.registry.models():
            replace()
        return lease

    monkeypatch.setattr(served.registry, "acquire", acquire_and_replace)
    assert served.call("ModelInfer", infer_request(x=X), timeout=10).outputs
    assert old not in served.registry.models()


def test_a_request_moves_to_another_thread_if_its_model_is_replaced_before_the_lease(
    replaced: tuple[Served, LoopbackModel, Callable[[], None], Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, old, replace, gate = replaced
    claim = old.claim

    def claim_and_replace(nbytes: int) -> Claim | None:
        claimed = claim(nbytes)
        replace()
        return claimed

    monkeypatch.setattr(old, "claim", claim_and_replace)
    waiting = served.stub("ModelInfer").future(infer_request(x=X))
    until(lambda: old not in served.registry.models())
    assert served.call("ServerLive", pb.ServerLiveRequest(), timeout=10).live
    assert not waiting.done()
    gate.go.set()
    assert waiting.result(30).outputs
    until(lambda: old.batcher._slots.idle)  # the claim on the old model is given back


def test_a_call_holds_its_model_once_and_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unload waits for the calls that hold the model."""
    run, held = Threads(), 0
    with serving(LoopbackModel(run=run, inline=True)) as served:
        acquire = served.registry.acquire

        @contextmanager
        def counted(name: str, version: str) -> Iterator[LoopbackModel]:
            nonlocal held
            with acquire(name, version) as model:
                held += 1
                try:
                    yield model
                finally:
                    held -= 1

        monkeypatch.setattr(served.registry, "acquire", counted)
        run_and_look, seen = served.registry.models()[0]._run, []

        def look(feeds: Mapping[str, Array]) -> dict[str, Array]:
            seen.append(held)
            return run_and_look(feeds)

        monkeypatch.setattr(served.registry.models()[0], "_run", look)
        assert answered_on_grpc(served, run, infer_request(x=X))
        assert set(seen) == {1}
        wrong = infer_request(x=X.astype(np.float64))
        assert served.refusal("ModelInfer", wrong)[0] is grpc.StatusCode.INVALID_ARGUMENT
        until(lambda: held == 0)


def test_executors_alone_run_a_model_whose_runtime_keeps_memory_per_thread() -> None:
    run = Threads()
    with serving(LoopbackModel(run=run)) as served:
        assert not answered_on_grpc(served, run, infer_request(x=X))
        assert "executor" in run.names[-1]


@pytest.mark.parametrize("calls", [200])
def test_every_one_of_many_concurrent_requests_is_answered(calls: int) -> None:
    run = Threads()
    with serving(LoopbackModel(run=run, inline=True), max_in_flight=1024) as served:
        assert answered_on_grpc(served, run, infer_request(x=X))
        futures = [served.stub("ModelInfer").future(infer_request(x=X)) for _ in range(calls)]
        assert all(future.result(60).outputs for future in futures)
        until(lambda: served.transport._services.inference._shares.in_use == 0)


def test_a_small_request_that_takes_long_is_not_answered_on_grpcs_own_thread() -> None:
    """A request with tensors in shared memory reads megabytes; one with classification builds strings."""
    run = Threads()
    with serving(LoopbackModel(run=run, inline=True)) as served:
        assert answered_on_grpc(served, run, infer_request(x=X))
        message = infer_request(x=X)
        message.inputs[0].parameters["shared_memory_region"].string_param = "r"
        assert served.transport._services._servicer.claim(message.SerializeToString()) is None
        message = infer_request(x=X)
        message.outputs.add(name="y").parameters["classification"].int64_param = 1
        assert served.transport._services._servicer.claim(message.SerializeToString()) is None
