"""Every rejection over a real socket: the client's status, and that its reason is counted once."""

import threading
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from loopback import Gate, LoopbackModel, Served, infer_request, serving
from rawgrpc import RawConnection
from waiting import until

from bf16kit.protocol import inference_pb2 as pb
from bf16kit.service.grpc.handlers import SERVICE

X = np.ones((1, 3), np.float32)
INFER = f"/{SERVICE}/ModelInfer"
MESSAGE = infer_request(x=X).SerializeToString()


@pytest.fixture
def gate() -> Gate:
    return Gate()


def refused(call: Any) -> StatusCode:
    """Return the code with which a call, or the stream that it opens, fails."""
    with pytest.raises(grpc.RpcError) as error:
        next(iter(call()))
    code: StatusCode = error.value.code()
    return code


def run_held(served: Served, gate: Gate, calls: int = 1) -> list[Any]:
    """Start ``calls`` requests on one connection, of which the first runs.

    They end when the caller drops the returned list.
    """
    begun = [served.stub("ModelInfer").future(infer_request(x=X)) for _ in range(calls)]
    assert gate.started.wait(30)
    until(lambda: served.transport.pools["inference"].shares.in_use == calls)
    return begun


def test_requests_of_one_connection_beyond_its_share_are_rejected(gate: Gate) -> None:
    with serving(LoopbackModel(run=gate, max_batch_size=0), max_in_flight=8) as served, gate:
        held = run_held(served, gate, calls=7)
        code, details = served.refusal("ModelInfer", infer_request(x=X))
        assert code is StatusCode.RESOURCE_EXHAUSTED
        assert "this connection has its share" in details
        assert served.log.refusals == ["connection_share"]
        assert not any(call.done() for call in held)


def test_requests_for_one_model_beyond_its_share_are_rejected(gate: Gate) -> None:
    """Another connection has a place, but not for this model; another model still serves."""
    model = LoopbackModel(run=gate, max_batch_size=0)
    with (
        serving(model, LoopbackModel("other"), max_in_flight=8) as served,
        RawConnection(served.port) as another,
        gate,
    ):
        held = run_held(served, gate, calls=7)
        until(lambda: len(model.seen) == 7)
        stream = another.call(INFER, MESSAGE)
        until(lambda: stream in another.ended)
        assert served.log.refusals == ["model_share"]
        assert served.log.seen == [("echo", 1, "RESOURCE_EXHAUSTED")]
        stream = another.call(INFER, infer_request("other", x=X).SerializeToString())
        until(lambda: stream in another.ended)
        assert served.log.seen[1:] == [("other", 1, "OK")]
        gate.go.set()
        assert [call.result(30).model_name for call in held] == ["echo"] * 7
        until(lambda: served.transport.pools["inference"].shares.in_use == 0)
        assert served.call("ModelInfer", infer_request(x=X)).model_name == "echo", "the shares are returned"


def test_a_rejection_by_a_full_queue_is_counted_by_the_model(gate: Gate) -> None:
    model = LoopbackModel(run=gate, max_batch_size=0, max_queue=1)
    with serving(model) as served, gate:
        begun = run_held(served, gate)
        begun += [served.stub("ModelInfer").future(infer_request(x=X)) for _ in range(2)]
        until(lambda: served.log.seen)
        assert served.log.seen == [("echo", 1, "RESOURCE_EXHAUSTED")]
        assert served.log.refusals == []


def test_requests_beyond_the_byte_limit_are_rejected(gate: Gate) -> None:
    rows = infer_request(x=np.ones((1000, 3), np.float32))
    model = LoopbackModel(run=gate, max_batch_size=1000)
    with serving(model, max_request_bytes=len(rows.SerializeToString()) + 100) as served, gate:
        held = served.stub("ModelInfer").future(rows)
        assert gate.started.wait(30)
        code, details = served.refusal("ModelInfer", rows)
        assert code is StatusCode.RESOURCE_EXHAUSTED
        assert "requests and responses hold" in details
        assert (served.log.refusals, served.log.seen) == (["bytes"], [])
        assert refused(lambda: served.stub("ModelStreamInfer")(iter([rows]), timeout=30)) is code
        assert (served.log.refusals, served.log.seen) == (["bytes"] * 2, [])
        gate.go.set()
        held.exception(30)


def test_responses_beyond_the_byte_limit_become_rejections() -> None:
    wide = LoopbackModel(run=lambda feeds: {"y": np.ones((1, 1 << 18), np.float32)}, max_batch_size=1)
    with serving(wide, max_request_bytes=(1 << 20) + 4096) as served, RawConnection(served.port, window=0) as deaf:
        deaf.call(INFER, MESSAGE)
        until(lambda: served.transport.pools["inference"].budget.in_use > 1 << 20)
        assert served.refusal("ModelInfer", infer_request(x=X))[0] is StatusCode.RESOURCE_EXHAUSTED
        assert served.log.refusals == ["bytes"]
        (answer,) = served.stub("ModelStreamInfer")(iter([infer_request(x=X)]), timeout=30)
        assert "requests and responses hold" in answer.error_message
        assert served.log.refusals == ["bytes"] * 2
        assert [code for *_, code in served.log.seen] == ["OK"] + ["RESOURCE_EXHAUSTED"] * 2


def opened(served: Served, kind: str) -> Any:
    """Open a call of this class of RPCs, and return its responses."""
    health: Any = health_pb2_grpc.HealthStub(served.channel)
    reflect: Any = reflection_pb2_grpc.ServerReflectionStub(served.channel)
    if kind == "streams":
        return served.stub("ModelStreamInfer")(iter([infer_request(x=X)]), timeout=30)
    if kind == "watches":
        return health.Watch(health_pb2.HealthCheckRequest(), timeout=30)
    if kind == "control":
        return iter([served.call("ModelMetadata", pb.ModelMetadataRequest(name="echo"))])
    question = reflection_pb2.ServerReflectionRequest(list_services="")
    return reflect.ServerReflectionInfo(iter([question]), timeout=30)


@pytest.mark.parametrize("kind", ["streams", "watches", "control", "reflection"])
def test_calls_of_each_kind_have_a_limit_and_take_no_place_of_others(kind: str) -> None:
    with serving(LoopbackModel(), max_streams=1, max_watches=1, max_control_calls=1) as served:
        shares = served.transport.pools[kind].shares
        while not shares.full:
            assert shares.acquire(f"client {shares.in_use}")
        assert shares.in_use == (16 if kind == "reflection" else 1)
        assert refused(lambda: opened(served, kind)) is StatusCode.RESOURCE_EXHAUSTED
        assert served.log.refusals == [kind]
        for other in {"streams", "watches", "control", "reflection"} - {kind}:
            assert next(opened(served, other))


@pytest.mark.long
def test_calls_during_a_shutdown_are_rejected(gate: Gate) -> None:
    """Each of them delays the step at which gRPC closes its port by another second."""
    with serving(LoopbackModel(run=gate), quiet_seconds=1.0, max_delivery_seconds=30.0) as served, gate:
        (held,) = run_held(served, gate)
        stopping = threading.Thread(target=served.transport.stop, args=(30.0,))
        stopping.start()
        until(served.reports_draining)
        assert served.refusal("ModelInfer", infer_request(x=X))[0] is StatusCode.UNAVAILABLE
        assert served.log.refusals == ["draining"]
        assert refused(lambda: served.stub("ModelStreamInfer")(iter([]), timeout=30)) is StatusCode.UNAVAILABLE
        assert served.log.refusals == ["draining"] * 2
        gate.go.set()
        assert held.result(30).model_name == "echo"
        stopping.join(30)


def test_a_metadata_rejection_counts_as_draining_only_during_a_shutdown() -> None:
    with serving(LoopbackModel("slow", state="loading")) as served:
        assert served.refusal("ModelMetadata", pb.ModelMetadataRequest(name="slow"))[0] is StatusCode.UNAVAILABLE
        assert served.log.refusals == []
        served.registry.draining = True
        assert served.refusal("ModelMetadata", pb.ModelMetadataRequest(name="slow"))[0] is StatusCode.UNAVAILABLE
        assert served.log.refusals == ["draining"]
