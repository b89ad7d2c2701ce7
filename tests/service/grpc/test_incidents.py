"""Errors in a call: expected ones have a code; of others the client gets an incident number, and the log the text."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc
from loopback import LoopbackModel, LoopbackRegistry, RequestLog, Served, infer_request, serving

from bf16kit.messages import errors
from bf16kit.protocol import inference_pb2 as pb
from service.grpc import admission as admission_module
from service.grpc.call import InferenceCall
from service.grpc.health import HealthServicer
from service.grpc.status import CODES, status_of

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


def test_a_call_whose_admission_fails_ends_and_grpcs_own_thread_continues(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(LoopbackModel()) as served, caplog.at_level(logging.ERROR):
        with monkeypatch.context() as broken:
            broken.setattr(admission_module.RpcPool, "admit", _fail)
            ended, details = served.refusal("ModelInfer", infer_request(x=X))
        assert ended is grpc.StatusCode.CANCELLED
        assert "secret" not in details
        assert "/secret" in caplog.text
        assert _infer(served)


@pytest.mark.parametrize("broken", ["start", "_answer"])
def test_a_bug_in_a_call_ends_that_call_and_not_the_server(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    with serving(LoopbackModel()) as served:
        with monkeypatch.context() as patched:
            patched.setattr(InferenceCall, broken, lambda *_: 1 // 0)
            assert served.refusal("ModelInfer", infer_request(x=X))[0] is grpc.StatusCode.CANCELLED
        assert served.call("ModelInfer", infer_request(x=X)).model_name == "echo"
        assert served.transport.pools["inference"].shares.in_use <= 1  # the last call's, until gRPC reports its end
