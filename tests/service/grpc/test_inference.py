"""The RPCs over a real socket: every row of the status table, deadlines, cancellation, and metrics."""

import gc
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from grpc import StatusCode
from loopback import Gate, LoopbackModel, Served, infer_request, serving
from waiting import until

from bf16kit.messages.errors import RuntimeFailure
from bf16kit.protocol import inference_pb2 as pb
from bf16kit.service.contract import Array
from bf16kit.service.request import Cancellation

X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def gate() -> Iterator[Gate]:
    with Gate() as gate:
        yield gate


@pytest.fixture
def served() -> Iterator[Served]:
    with serving(
        LoopbackModel("echo"), LoopbackModel("slow", state="loading"), LoopbackModel("bad", state="unavailable")
    ) as served:
        yield served


def changed(message: pb.ModelInferRequest, **fields: Any) -> pb.ModelInferRequest:
    for name, value in fields.items():
        setattr(message, name, value)
    return message


def test_requests_for_an_unknown_model_or_version_are_counted_without_its_name(served: Served) -> None:
    assert served.refusal("ModelInfer", infer_request("nobody", x=X))[0] is StatusCode.NOT_FOUND
    assert served.refusal("ModelInfer", changed(infer_request(x=X), model_version="9"))[0] is StatusCode.NOT_FOUND
    for method, message in (
        ("ModelMetadata", pb.ModelMetadataRequest(name="nobody")),
        ("ModelConfig", pb.ModelConfigRequest(name="nobody")),
        ("ModelStatistics", pb.ModelStatisticsRequest(name="nobody")),
    ):
        assert served.refusal(method, message)[0] is StatusCode.NOT_FOUND
    assert (served.log.seen, served.log.refusals) == ([], ["unknown_model"] * 2)


def test_a_request_for_a_model_that_is_not_ready_is_rejected_and_counted(served: Served) -> None:
    """UNAVAILABLE tells the client to try again, which helps only with a model that is loading."""
    assert served.refusal("ModelInfer", infer_request("slow", x=X))[0] is StatusCode.UNAVAILABLE
    assert served.refusal("ModelInfer", infer_request("bad", x=X))[0] is StatusCode.NOT_FOUND
    assert served.log.seen == [("slow", 1, "UNAVAILABLE"), ("bad", 1, "NOT_FOUND")]


def test_a_draining_server_is_unavailable(served: Served) -> None:
    served.registry.draining = True
    assert served.refusal("ModelInfer", infer_request(x=X))[0] is StatusCode.UNAVAILABLE
    assert not served.call("ServerReady", pb.ServerReadyRequest()).ready
    assert served.call("ServerLive", pb.ServerLiveRequest()).live


def test_a_request_whose_timeout_passes_in_the_queue_is_never_run(gate: Gate) -> None:
    model = LoopbackModel(run=gate, max_batch_size=0)
    with serving(model) as served:
        running = served.stub("ModelInfer").future(infer_request(x=X))
        assert gate.started.wait(30)
        late = infer_request(x=X)
        late.parameters["timeout"].int64_param = 20_000
        assert served.refusal("ModelInfer", late)[0] is StatusCode.DEADLINE_EXCEEDED
        assert served.log.seen == [("echo", 1, "DEADLINE_EXCEEDED")]
        gate.go.set()
        running.result(30)
        assert served.call("ModelInfer", infer_request(x=X))
        assert model.calls == 2


@pytest.mark.parametrize("leaves", [True, False])
def test_a_client_that_stops_waiting_during_the_run_is_counted_with_the_code_it_sees(gate: Gate, leaves: bool) -> None:
    with serving(LoopbackModel(run=gate)) as served:
        running = served.stub("ModelInfer").future(infer_request(x=X), timeout=None if leaves else 0.3)
        assert gate.started.wait(30)
        if leaves:
            running.cancel()
            until(lambda: _first(served).cancelled)
        else:
            assert running.exception(30) is not None
        gate.go.set()
        until(lambda: served.log.seen)
        assert served.log.seen == [("echo", 1, "CANCELLED" if leaves else "DEADLINE_EXCEEDED")]


def test_failed_requests_are_observed_with_their_times(gate: Gate) -> None:
    def fail(feeds: Mapping[str, Array]) -> dict[str, Array]:
        gate(feeds)
        raise RuntimeFailure("no")

    with serving(LoopbackModel(run=fail, max_batch_size=0)) as served:
        infer = served.stub("ModelInfer")
        calls = [infer.future(changed(infer_request(x=X), id=str(i))) for i in range(2)]
        until(lambda: gate.started.is_set() and len(served.registry.find("echo", "").seen) == 2)
        served.refusal("ModelInfer", infer_request(x=X[:, :2]))
        gate.go.set()
        assert [call.exception(30).code() for call in calls] == [StatusCode.INTERNAL] * 2
        until(lambda: len(served.log.observations) == 3)
    refused, *failed = served.log.observations
    assert (refused.code, refused.timings) == ("INVALID_ARGUMENT", None)
    assert {seen.request_id for seen in failed} == {"0", "1"}
    for seen in failed:
        assert seen.timings is not None
        assert 0 < seen.timings.queue + seen.timings.compute <= seen.seconds


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="echo")),
        ("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name="echo")),
        ("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest()),
        ("SystemSharedMemoryRegister", pb.SystemSharedMemoryRegisterRequest(name="r", key="/r")),
        ("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest()),
        ("RepositoryIndex", pb.RepositoryIndexRequest(repository_name="other")),
        ("CudaSharedMemoryStatus", pb.CudaSharedMemoryStatusRequest()),
        ("CudaSharedMemoryRegister", pb.CudaSharedMemoryRegisterRequest(name="r")),
        ("TraceSetting", pb.TraceSettingRequest()),
    ],
)
def test_an_rpc_that_is_not_served_is_unimplemented_with_the_reason(served: Served, method: str, message: Any) -> None:
    code, details = served.refusal(method, message)
    assert code is StatusCode.UNIMPLEMENTED
    assert "not supported" in details or "start" in details


def test_a_request_gets_its_response_and_is_observed_once(served: Served) -> None:
    answer = served.call("ModelInfer", changed(infer_request(x=X), id="abc"))
    assert answer.raw_output_contents[0] == X.tobytes()
    assert (answer.model_version, answer.id) == ("1", "abc")
    assert served.log.seen == [("echo", 1, "OK")]
    assert served.log.observations[0].seconds > 0


def test_a_replaced_models_requests_are_read_by_the_new_models_codec() -> None:
    old, new = LoopbackModel(), LoopbackModel(max_batch_size=1)
    with serving(old) as served:
        new.batcher.start()
        served.call("ModelInfer", infer_request(x=X))
        served.registry.replace(old, new)
        assert "at most 1" in served.refusal("ModelInfer", infer_request(x=X))[1]
        new.batcher.close()


@pytest.mark.long
def test_a_replaced_model_is_not_kept_alive_by_its_codec() -> None:
    old, new = LoopbackModel(), LoopbackModel()
    with serving(old) as served:
        served.call("ModelInfer", infer_request(x=X))
        gone = weakref.ref(old)
        served.registry.replace(old, new)
        old.batcher.close()
        del old

        def is_gone() -> bool:
            gc.collect()
            return gone() is None

        until(is_gone, 1.0)


def _first(served: Served) -> Cancellation:
    """Return the cancellation of the first request."""
    found = served.registry.find("echo", "").seen[0].cancellation
    assert found is not None
    return found
