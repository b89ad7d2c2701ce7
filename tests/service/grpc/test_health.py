"""grpc.health.v1 for the server and for each model, as Kubernetes' probe, Envoy and grpc-go use it."""

import threading
import time
from typing import Any, Self

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from loopback import LoopbackModel, LoopbackRegistry, Served, serving
from waiting import until

from bf16kit.service.grpc.handlers import SERVICE
from bf16kit.service.grpc.health import HealthServicer
from bf16kit.service.request import Cancellation

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


def health(served: Served) -> Any:
    """Return the generated stub, whose RPCs exist only after it is created."""
    return health_pb2_grpc.HealthStub(served.channel)


def check(served: Served, service: str) -> int:
    request = health_pb2.HealthCheckRequest(service=service)
    status: int = health(served).Check(request, timeout=30).status
    return status


def watch(served: Served, service: str) -> Any:
    return health(served).Watch(health_pb2.HealthCheckRequest(service=service), timeout=60)


def test_the_server_each_model_and_the_process_have_their_own_status() -> None:
    """A liveness probe checks the name of the health service itself: the process is live whatever its models are."""
    with serving(LoopbackModel("good"), LoopbackModel("bad", state="unavailable")) as served:
        assert check(served, "good") == SERVING
        assert check(served, "bad") == NOT_SERVING
        assert check(served, "") == NOT_SERVING  # the server is ready when all its models are
        assert check(served, "inference.GRPCInferenceService") == NOT_SERVING
        assert check(served, "grpc.health.v1.Health") == SERVING


def test_a_watcher_sees_each_change_once() -> None:
    model, other = LoopbackModel("m", state="loading"), LoopbackModel("other")
    with serving(model, other) as served:
        watches = [watch(served, service) for service in ("m", "", "other", "nobody")]
        assert [next(each).status for each in watches] == [NOT_SERVING, NOT_SERVING, SERVING, SERVICE_UNKNOWN]
        served.registry.change(model, "ready")
        assert [next(each).status for each in watches[:2]] == [SERVING, SERVING]
        served.registry.change(other, "unavailable")
        assert next(watches[2]).status == NOT_SERVING, "its unchanged status was not repeated"


class Watcher:
    """A watch without a socket: gRPC's Python client may lose a message if the end of the stream overtakes it."""

    def __init__(self, servicer: HealthServicer, service: str = "m") -> None:
        self.started = 0.0
        self.deadline: float | None = None
        self.client = "somebody"
        self.cancellation = Cancellation()
        self.sent: list[Any] = []
        self.reads = threading.Event()
        self.reads.set()
        self._servicer, self._service = servicer, service

    def start(self) -> Self:
        self._servicer.watch(health_pb2.HealthCheckRequest(service=self._service), self, self.send)
        return self

    def send(self, answer: Any) -> None:
        self.sent.append(answer and answer.status)
        assert answer is None or self.reads.wait(30)

    def metadata_value(self, key: str) -> str | None: ...
    def reserve_more(self, nbytes: int) -> None: ...


@pytest.mark.parametrize(("service", "last"), [("m", [NOT_SERVING]), ("grpc.health.v1.Health", [])])
def test_at_shutdown_a_watcher_gets_not_serving_unless_of_the_process_and_the_end(
    service: str, last: list[int]
) -> None:
    """A liveness probe must not kill a server that drains."""
    servicer = HealthServicer(LoopbackRegistry([LoopbackModel("m")]), SERVICE)
    watcher = Watcher(servicer, service).start()
    until(lambda: watcher.sent)
    servicer.shut_down(timeout=30)
    assert watcher.sent == [SERVING, *last, None]
    assert servicer.check(health_pb2.HealthCheckRequest(service="grpc.health.v1.Health"), None).status == SERVING


def test_clients_that_never_read_delay_no_update_and_get_the_last_status_when_they_read() -> None:
    registry = LoopbackRegistry([LoopbackModel("m")])
    servicer = HealthServicer(registry, SERVICE, threads=1)
    good = Watcher(servicer).start()
    until(lambda: good.sent)
    deaf = [Watcher(servicer) for _ in range(9)]
    for watcher in deaf:
        watcher.reads.clear()
        watcher.start()
    until(lambda: any(watcher.sent for watcher in deaf))
    registry.drain()
    until(lambda: good.sent == [SERVING, NOT_SERVING])
    assert sum(bool(watcher.sent) for watcher in deaf) == 1
    for watcher in deaf:
        watcher.reads.set()
    until(lambda: all(watcher.sent[-1:] == [NOT_SERVING] for watcher in deaf))
    servicer.shut_down(timeout=30)
    assert all(watcher.sent[-1] is None for watcher in (good, *deaf))


def test_watchers_that_leave_while_statuses_change_block_no_other_call() -> None:
    model = LoopbackModel("m")
    with serving(model) as served:
        for turn in range(100):
            watching = watch(served, "m")
            next(watching)
            served.registry.change(model, "unavailable" if turn % 2 else "ready")
            watching.cancel()
        assert check(served, "m") in (SERVING, NOT_SERVING)


def test_a_watcher_whose_send_fails_is_logged_and_removed(caplog: pytest.LogCaptureFixture) -> None:
    servicer = HealthServicer(LoopbackRegistry([LoopbackModel("m")]), SERVICE)
    watcher = Watcher(servicer)
    watcher.send = lambda answer: 1 // 0  # type: ignore[method-assign, assignment]
    watcher.start()
    until(lambda: "cannot send a health update for 'm'" in caplog.text)
    begun = time.monotonic()
    servicer.shut_down(timeout=60)  # waits for watchers
    assert time.monotonic() - begun < 30


def test_a_watch_that_begins_after_the_shutdown_ends_at_once() -> None:
    """Otherwise the watch would delay the drain until its timeout."""
    servicer = HealthServicer(LoopbackRegistry([LoopbackModel("m")]), SERVICE)
    servicer.shut_down(timeout=30)
    assert Watcher(servicer).start().sent == [None]
