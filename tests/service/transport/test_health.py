"""grpc.health.v1 for the server and for each model, as Kubernetes' probe, Envoy and grpc-go ask."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from loopback import LoopbackModel, LoopbackRegistry, Served, serving, until

from service.request import Cancellation
from service.transport.handlers import SERVICE
from service.transport.health import HealthServicer

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


def health(served: Served) -> Any:
    """The generated stub, whose RPCs exist only once it is made."""
    return health_pb2_grpc.HealthStub(served.channel)


def check(served: Served, service: str) -> int:
    request = health_pb2.HealthCheckRequest(service=service)
    status: int = health(served).Check(request, timeout=30).status
    return status


def test_server_and_models_are_told_apart() -> None:
    with serving(LoopbackModel("good"), LoopbackModel("bad", state="unavailable")) as served:
        assert check(served, "good") == SERVING
        assert check(served, "bad") == NOT_SERVING
        assert check(served, "") == NOT_SERVING  # the server is ready when all its models are
        assert check(served, "inference.GRPCInferenceService") == NOT_SERVING


def test_the_process_is_live_whatever_its_models_are() -> None:
    """What a liveness probe asks by the name of the health service itself."""
    with serving(LoopbackModel("loads", state="loading"), LoopbackModel("bad", state="unavailable")) as served:
        assert check(served, "") == NOT_SERVING
        assert check(served, "grpc.health.v1.Health") == SERVING
    with serving() as empty:
        assert check(empty, "") == NOT_SERVING
        assert check(empty, "grpc.health.v1.Health") == SERVING


def test_a_service_nobody_heard_of_is_not_found() -> None:
    with serving(LoopbackModel()) as served:
        with pytest.raises(grpc.RpcError) as refused:
            check(served, "nobody")
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_watcher_sees_a_model_come() -> None:
    model = LoopbackModel("m", state="loading")
    with serving(model) as served:
        stub = health(served)
        of_model = stub.Watch(health_pb2.HealthCheckRequest(service="m"), timeout=30)
        of_server = stub.Watch(health_pb2.HealthCheckRequest(service=""), timeout=30)
        assert (next(of_model).status, next(of_server).status) == (NOT_SERVING, NOT_SERVING)
        served.registry.change(model, "ready")
        assert (next(of_model).status, next(of_server).status) == (SERVING, SERVING)


def test_at_shut_down_a_watcher_is_told_and_its_stream_is_ended() -> None:
    """Without a socket: gRPC's Python client may lose a message that the stream's end overtakes."""

    sent: list[Any] = []
    servicer = HealthServicer(LoopbackRegistry([LoopbackModel("m")]), SERVICE)
    servicer.watch(health_pb2.HealthCheckRequest(service="m"), "somebody", Cancellation(), sent.append)
    until(lambda: sent)
    servicer.shut_down(patience=30)
    assert [answer and answer.status for answer in sent] == [SERVING, NOT_SERVING, None]


def test_at_shut_down_the_process_is_live_still_and_who_watches_that_is_let_go() -> None:
    """A server that drains is not to be killed for it."""

    sent: list[Any] = []
    servicer = HealthServicer(LoopbackRegistry([LoopbackModel("m")]), SERVICE)
    question = health_pb2.HealthCheckRequest(service="grpc.health.v1.Health")
    servicer.watch(question, "somebody", Cancellation(), sent.append)
    until(lambda: sent)
    servicer.shut_down(patience=30)
    assert [answer and answer.status for answer in sent] == [SERVING, None]
    assert servicer.check(question, None).status == SERVING


def test_an_unchanged_status_is_not_repeated() -> None:
    steady, other = LoopbackModel("steady"), LoopbackModel("other")
    with serving(steady, other) as served:
        watch = health(served).Watch(health_pb2.HealthCheckRequest(service="steady"), timeout=30)
        assert next(watch).status == SERVING
        served.registry.change(other, "unavailable")
        served.registry.change(steady, "unavailable")
        assert next(watch).status == NOT_SERVING


def test_a_watcher_of_something_unknown_is_told_so_and_kept() -> None:
    with serving(LoopbackModel()) as served:
        watch = health(served).Watch(health_pb2.HealthCheckRequest(service="nobody"), timeout=30)
        assert next(watch).status == SERVICE_UNKNOWN


def test_watchers_who_leave_while_statuses_change_hold_nobody_up() -> None:
    model = LoopbackModel("m")
    with serving(model) as served:
        for turn in range(100):
            watch = health(served).Watch(health_pb2.HealthCheckRequest(service="m"), timeout=60)
            next(watch)
            served.registry.change(model, "unavailable" if turn % 2 else "ready")
            watch.cancel()
        assert check(served, "m") in (SERVING, NOT_SERVING)


def test_more_watchers_than_threads_hold_no_thread() -> None:
    with serving(LoopbackModel(), max_in_flight=1, max_streams=1) as served:
        stub = health(served)
        watches = []
        for _ in range(40):
            watches.append(stub.Watch(health_pb2.HealthCheckRequest(service=""), timeout=60))
            assert next(watches[-1]).status == SERVING
        assert check(served, "") == SERVING
        for watch in watches:
            watch.cancel()


def test_a_watcher_that_cannot_be_told_is_in_the_log_and_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    def fail(response: object) -> None:
        raise ValueError("no such call")

    servicer = HealthServicer(LoopbackRegistry([LoopbackModel("m")]), SERVICE)
    servicer.watch(health_pb2.HealthCheckRequest(service="m"), "somebody", Cancellation(), fail)
    until(lambda: "cannot be told of 'm'" in caplog.text)
    until(lambda: not servicer._watchers)
    servicer.shut_down(patience=30)


def test_a_watch_that_comes_after_the_shut_down_is_ended_at_once() -> None:
    """It would hold up the drain for all of its time."""

    sent: list[Any] = []
    servicer = HealthServicer(LoopbackRegistry([LoopbackModel("m")]), SERVICE)
    servicer.shut_down(patience=30)
    servicer.watch(health_pb2.HealthCheckRequest(service="m"), "somebody", Cancellation(), sent.append)
    assert sent == [None]
