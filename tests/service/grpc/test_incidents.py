"""Errors in a call, and the log: expected ones have a code; of others the client gets an incident number."""

import io
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc
from loopback import LoopbackModel, LoopbackRegistry, RequestLog, Served, infer_request, serving
from ownlog import own_log
from waiting import until

from bf16kit.messages import errors
from bf16kit.messages.errors import RuntimeFailure
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.protocol import inference_pb2 as pb
from bf16kit.service.contract import Array
from bf16kit.service.grpc.admission import RpcPool
from bf16kit.service.grpc.call import InferenceCall
from bf16kit.service.grpc.health import HealthServicer
from bf16kit.service.grpc.status import CODES, status_of

X = np.ones((1, 3), np.float32)


def test_every_request_error_has_a_code_and_keeps_its_message_up_to_500_characters() -> None:
    refusals = {e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, errors.RequestError)}
    assert CODES.keys() == refusals - {errors.RequestError}
    for kind, code in CODES.items():
        status = status_of(kind("input 'x' is wrong"))
        assert (status.code, status.details) == (code, "input 'x' is wrong")
    assert len(status_of(errors.InvalidRequest("x" * 100_000)).details) == 500


def _fail(*anything: object, **more: object) -> Any:
    raise ValueError("/secret")


def _fail_after_one(servicer: object, requests: Any, call: object) -> Any:
    next(requests)
    yield reflection_pb2.ServerReflectionResponse()
    _fail()


def _metadata(served: Served) -> object:
    return served.call("ModelMetadata", pb.ModelMetadataRequest(name="echo"))


def _infer(served: Served) -> object:
    return served.call("ModelInfer", infer_request(x=X))


def _stream(served: Served) -> object:
    ends_on_error = [("triton_grpc_error", "true")]
    return list(served.stub("ModelStreamInfer")(iter([infer_request(x=X)]), timeout=30, metadata=ends_on_error))


def _watch(served: Served) -> object:
    stub: Any = health_pb2_grpc.HealthStub(served.channel)
    return next(stub.Watch(health_pb2.HealthCheckRequest(), timeout=30))


def _reflect(served: Served) -> object:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(served.channel)
    question = reflection_pb2.ServerReflectionRequest(list_services="")
    return list(stub.ServerReflectionInfo(iter([question]), timeout=30))


@pytest.mark.parametrize(
    ("owner", "name", "ask", "failure"),
    [
        pytest.param(LoopbackRegistry, "get", _metadata, _fail, id="a control call"),
        pytest.param(RequestLog, "request", _infer, _fail, id="metrics of a request"),
        pytest.param(RequestLog, "request", _stream, _fail, id="metrics of a stream's request"),
        pytest.param(HealthServicer, "_notify", _watch, _fail, id="a watch"),
        pytest.param(reflection.ReflectionServicer, "ServerReflectionInfo", _reflect, _fail_after_one, id="a stream"),
    ],
)
def test_the_client_gets_an_incident_number_and_the_log_gets_the_text(
    owner: type,
    name: str,
    ask: Callable[[Served], object],
    failure: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving(LoopbackModel()) as served, caplog.at_level(logging.ERROR):
        with monkeypatch.context() as broken:
            broken.setattr(owner, name, failure)
            with pytest.raises(grpc.RpcError) as failed:
                ask(served)
        details = failed.value.details() or ""
        assert failed.value.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in details
        (logged,) = [record for record in caplog.records if "/secret" in record.getMessage()]
        assert details.split("incident ")[1].split(";")[0] in logged.getMessage()
        assert ask(served)


@pytest.mark.parametrize(("owner", "name"), [(RpcPool, "admit"), (InferenceCall, "start"), (InferenceCall, "_answer")])
def test_a_bug_on_grpcs_own_thread_ends_its_call_and_not_the_server(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(LoopbackModel()) as served, caplog.at_level(logging.ERROR):
        with monkeypatch.context() as broken:
            broken.setattr(owner, name, _fail)
            ended, details = served.refusal("ModelInfer", infer_request(x=X))
        assert (ended, "secret" in details) == (grpc.StatusCode.CANCELLED, False)
        assert "/secret" in caplog.text
        assert _infer(served)
        assert served.transport.pools["inference"].shares.in_use <= 1  # the last call's, until gRPC reports its end


# --- the log of a server ----------------------------------------------------------------------------------------------


PAYLOAD = "a-patients-name"


def events(stream: io.StringIO, level: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [json.loads(line) for line in stream.getvalue().splitlines()]
    return [event for event in found if event["level"] == level and event["logger"].startswith("bf16kit.service.")]


def named(name: str = "named", request_id: str = "r-1", value: str = PAYLOAD) -> pb.ModelInferRequest:
    message = infer_request(name, name=np.array([[value]], np.object_))
    message.id = request_id
    return message


def model(run: Callable[[Mapping[str, Array]], dict[str, Array]] | None = None) -> LoopbackModel:
    """Return a model that returns its string input."""
    return LoopbackModel(
        "named",
        run or (lambda feeds: {"y": feeds["name"]}),
        version=3,
        inputs=[TensorSpec("name", "string", ("batch", 1))],
        outputs=[TensorSpec("y", "string", ("batch", 1))],
    )


def test_each_request_is_logged_at_debug_with_its_times() -> None:
    with own_log("debug", "json") as stream, serving(model()) as served:
        served.call("ModelInfer", named())
        (answer,) = served.stub("ModelStreamInfer")(iter([named(request_id="r-2")]), timeout=30)
        assert answer.infer_response.id == "r-2"
        assert served.refusal("ModelInfer", named("nobody", "r-3"))[0] is StatusCode.NOT_FOUND
        assert served.refusal("ModelInfer", infer_request("named"))[0] is StatusCode.INVALID_ARGUMENT
        until(lambda: len(events(stream, "debug")) == 4)
        measured = list(served.log.observations)
        assert PAYLOAD not in stream.getvalue()
    answered, streamed, unknown, refused = events(stream, "debug")
    assert answered["message"].startswith("request answered")
    assert [answered[key] for key in ("model", "version", "request_id", "code")] == ["named", "3", "r-1", "OK"]
    for event, seen in zip((answered, streamed), measured, strict=False):
        assert seen.timings is not None
        assert event["total_s"] == pytest.approx(seen.seconds, abs=1e-6)
        assert event["queue_s"] == pytest.approx(seen.timings.queue, abs=1e-6)
        assert event["compute_s"] == pytest.approx(seen.timings.compute, abs=1e-6)
    assert (streamed["request_id"], streamed["code"]) == ("r-2", "OK")
    assert [unknown.get(key) for key in ("model", "version", "code")] == ["nobody", None, "NOT_FOUND"]
    assert unknown["message"].startswith("request not answered")
    assert [refused.get(key) for key in ("request_id", "code", "queue_s")] == [None, "INVALID_ARGUMENT", None]


def test_an_incident_is_logged_as_an_error_with_its_request() -> None:
    def fail(feeds: Mapping[str, Array]) -> dict[str, Array]:
        raise RuntimeFailure("node 7 gave up")

    with own_log("info", "json") as stream, serving(model(fail)) as served:
        code, details = served.refusal("ModelInfer", named())
        assert code is StatusCode.INTERNAL
        assert "node 7" not in details
        assert PAYLOAD not in stream.getvalue()
        assert events(stream, "debug") == []
        (event,) = events(stream, "error")
    assert "node 7 gave up" in event["message"]
    assert [event[key] for key in ("model", "version", "request_id", "code")] == ["named", "3", "r-1", "INTERNAL"]
    assert event["incident"] in details
    assert "Traceback" in event["exception"]
