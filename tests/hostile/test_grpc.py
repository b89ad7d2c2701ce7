"""Hostile clients over real sockets try to block a server; it must serve the other clients meanwhile."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from subprocess import PIPE
from typing import Any

import figures
import grpc
import numpy as np
import pytest
from attacked import Target
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from loopback import LoopbackModel, infer_request, serving
from rawgrpc import RawConnection, framed
from waiting import until
from workerprocesses import Client

from bf16kit.service.grpc.handlers import SERVICE

pytestmark = pytest.mark.hostile
INFER = f"/{SERVICE}/ModelInfer"
STREAM = f"/{SERVICE}/ModelStreamInfer"
CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
X = np.ones((1, 16), np.float32)
MESSAGE = infer_request("mlp", x=X).SerializeToString()
_UNREAD_S = 45  # by then a response that is not read has ended its call: after 30 s without pressure


def infer(target: Target, timeout: float = 5.0) -> None:
    """Send one request of an honest client over a new connection.

    Retry if gRPC itself cancels the call, which it may do if more calls wait than it has room for (decision 0002). A
    rejection by bf16kit fails the test.
    """
    end = time.monotonic() + timeout
    with Client(target.address) as client:
        while True:
            try:
                assert client.infer(timeout=end - time.monotonic(), x=X)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.CANCELLED:
                    raise
                time.sleep(0.01)  # a pause before the next try
            else:
                return


@pytest.fixture(scope="module")
def target(attack: Callable[..., Target]) -> Target:
    return attack()


@pytest.fixture
def connections() -> Iterator[Callable[..., RawConnection]]:
    with ExitStack() as stack:
        yield lambda port, **more: stack.enter_context(RawConnection(port, **more))


Connect = Callable[..., RawConnection]


def begin_400(target: Target, connections: Connect, path: str) -> None:
    """Begin 400 calls over four connections, and send nothing but the headers."""
    for _ in range(4):
        silent = connections(target.port)
        for _ in range(100):
            silent.call(path)


@pytest.mark.parametrize(("many", "each"), [(1, 60), (20, 1), (150, 2)])
def test_health_watchers_that_do_not_read_delay_no_other_watcher(connections: Connect, many: int, each: int) -> None:
    """A new watcher gets the news in time too, as long as fewer connections than senders have such watchers."""
    figures.record(how_much=f"{many * each} watches over {many} connections" if many > 1 else f"{each} watches")
    model = LoopbackModel("m", state="loading")
    with serving(model) as served:
        request = health_pb2.HealthCheckRequest(service="m")
        stub: Any = health_pb2_grpc.HealthStub(served.channel)
        watch = stub.Watch(request, timeout=60)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        clients = [connections(served.port, window=0) for _ in range(many)]
        for client in clients * each:
            client.call(WATCH, request.SerializeToString())
        time.sleep(0.2)  # the server is sending them messages that they do not read, which nothing shows
        serving_now = health_pb2.HealthCheckResponse.SERVING
        for told in (watch, *([stub.Watch(request, timeout=60)] if many < 64 else [])):
            begun = time.monotonic()
            served.registry.change(model, "ready")
            # A new watcher may first have got the state at the time when it connected.
            assert any(news.status == serving_now for news in told)
            assert time.monotonic() - begun < 8
        assert stub.Check(request, timeout=1).status == serving_now
        until(lambda: sum(len(client.ended) for client in clients) >= 8, what="the end of those who do not read")
        assert set(served.log.refusals) == {"too_slow"}


def test_400_calls_without_a_request_delay_no_other_client(target: Target, connections: Connect) -> None:
    figures.record(how_much="400 calls over 4 connections")
    with target.stays_healthy():
        begin_400(target, connections, INFER)
        for _ in range(20):
            infer(target)


def test_health_checks_without_a_request_delay_no_other_health_check(target: Target, connections: Connect) -> None:
    figures.record(how_much="400 calls over 4 connections")
    with target.stays_healthy():
        begin_400(target, connections, CHECK)
        infer(target)
        time.sleep(1)  # meanwhile its health is checked all the time


def test_silent_reflection_streams_are_ended_and_delay_no_other_call(target: Target, connections: Connect) -> None:
    figures.record(how_much="100 streams")
    with target.stays_healthy():
        silent = connections(target.port)
        streams = [silent.call(REFLECTION) for _ in range(100)]
        infer(target)
        until(lambda: silent.ended.issuperset(streams), what="the end of the streams")
    with grpc.insecure_channel(target.address) as channel:
        call: Any = channel.stream_stream(
            REFLECTION,
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        (answer,) = call(iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=10)
        assert SERVICE in {service.name for service in answer.list_services_response.service}


def test_idle_streams_do_not_use_up_the_places_of_requests(target: Target, connections: Connect) -> None:
    figures.record(how_much="400 streams over 4 connections")
    with target.stays_healthy():
        begin_400(target, connections, STREAM)
        infer(target)


def test_1000_idle_connections_use_little_memory_and_delay_no_other_client(target: Target) -> None:
    figures.record(how_much="1,000 connections")
    infer(target)
    before = target.rss()
    with target.stays_healthy(), ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(RawConnection(target.port))
        infer(target)
        assert target.rss() - before < 100 << 20


def test_requests_sent_a_byte_a_second_are_ended_and_delay_no_other_client(
    target: Target, connections: Connect
) -> None:
    figures.record(how_much="50 requests")
    data = framed(MESSAGE)
    with target.stays_healthy():
        slow = connections(target.port)
        streams = [slow.call(INFER) for _ in range(50)]
        for byte in range(6):
            for stream in streams:
                slow.data(stream, data[byte : byte + 1])
            infer(target)
            time.sleep(1)  # the pace is the attack
        # No more than eight may be slow at once: 512 MiB of requests of 64 MiB each.
        assert len(slow.ended.intersection(streams)) == 42
        until(lambda: slow.ended.issuperset(streams), what="the end of the rest")


def test_unread_responses_use_up_one_connections_share_only_and_are_ended(target: Target, connections: Connect) -> None:
    figures.record(how_much="400 calls over one connection")
    with target.stays_healthy():
        deaf = connections(target.port, window=0)
        streams = [deaf.call(INFER, MESSAGE) for _ in range(400)]
        for _ in range(10):
            infer(target)
        until(lambda: deaf.ended.issuperset(streams), _UNREAD_S, what="the end of the calls")
        infer(target)


@pytest.mark.parametrize("path", [INFER, STREAM], ids=["requests", "streams"])
def test_responses_read_a_byte_a_second_are_ended_and_delay_no_other_client(
    target: Target, connections: Connect, path: str
) -> None:
    figures.record(how_much="50 calls")
    with target.stays_healthy():
        slow = connections(target.port, window=0)
        begun = time.monotonic()
        streams = {slow.call(path, MESSAGE) for _ in range(50)}
        while open_still := streams - slow.ended:
            assert time.monotonic() - begun < _UNREAD_S
            for stream in open_still:
                slow.take(stream, 1)
            infer(target)
            time.sleep(1)  # the pace is the attack
        assert slow.received >= 2 * len(streams)  # the clients did read some bytes


CANCEL_ALL = """
import sys, grpc
address, method, message = sys.argv[1], sys.argv[2], bytes.fromhex(sys.argv[3])
call = grpc.insecure_channel(address).unary_unary(method)
for _ in range(20):
    for future in [call.future(message) for _ in range(100)]:
        future.cancel()
print("cancelled", flush=True)
sys.stdin.read()
"""


def test_clients_that_cancel_everything_leave_nothing_behind(target: Target) -> None:
    """The client is a process that is killed: closing a channel with cancelled calls may hang (grpc/grpc#20026)."""
    figures.record(how_much="2,000 calls")
    command = [sys.executable, "-c", CANCEL_ALL, target.address, INFER, MESSAGE.hex()]
    with target.stays_healthy(), subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as client:
        try:
            assert client.stdout is not None
            assert client.stdout.readline() == "cancelled\n"
            infer(target)
        finally:
            client.kill()
        until(lambda: target.process.of_model("requests_in_flight") == 0)


def test_connections_that_come_and_go_leave_nothing_behind(target: Target) -> None:
    figures.record(how_much="1,000 connections")
    infer(target)
    before = target.rss()
    with target.stays_healthy():
        for turn in range(1000):
            with RawConnection(target.port) as passing:
                passing.call(INFER, MESSAGE)
                if turn % 2:
                    until(lambda passing=passing: passing.ended, what="an answer")  # type: ignore[misc]
        infer(target)
    assert target.rss() < before * 1.1 + (8 << 20)
