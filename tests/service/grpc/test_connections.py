"""Lifetime and number of connections, as set by ``_channel_arguments`` and seen from sockets."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from loopback import SOME_TOKEN, LoopbackModel, SlowTokens, infer_request, serving
from rawgrpc import RawConnection
from waiting import until

from bench.serving.http2 import closed_loop
from bf16kit.service.grpc.handlers import SERVICE
from bf16kit.service.grpc.transport import TransportOptions

X = np.ones((2, 3), np.float32)
READY = f"/{SERVICE}/ServerReady"


@contextlib.contextmanager
def connected(**options: Any) -> Iterator[RawConnection]:
    with serving(LoopbackModel(), **options) as served, RawConnection(served.port) as client:
        yield client


def answered(client: RawConnection) -> bool:
    """Return whether a call on this connection ends."""
    with contextlib.suppress(OSError):
        stream = client.call(READY, b"")
        until(lambda: stream in client.ended or client.closed, 10, "an answer or the end")
        return stream in client.ended
    return False


def test_only_a_client_that_does_not_reply_to_pings_is_disconnected() -> None:
    with (
        serving(LoopbackModel(), keepalive_seconds=0.3) as served,
        RawConnection(served.port) as alive,
        RawConnection(served.port, answers_pings=False) as dead,
    ):
        until(lambda: dead.closed, 10, "the end of a connection that nobody is behind")
        assert not alive.closed
        assert answered(alive)


@pytest.mark.long
def test_a_client_may_send_keepalive_pings() -> None:
    """Triton's clients ping every few seconds; gRPC's default is to disconnect them for it."""
    with connected(min_ping_seconds=0.02) as client:
        for _ in range(10):
            time.sleep(0.1)  # clients ping at intervals; only without them is a client disconnected
            client.ping()
        assert answered(client)
        assert not client.told_to_leave


def test_a_client_that_only_pings_is_disconnected() -> None:
    with connected() as client:
        for _ in range(10):
            with contextlib.suppress(OSError):
                client.ping()
        until(lambda: client.told_to_leave or client.closed, 10, "the end of the connection")


@pytest.mark.parametrize("option", ["max_connection_idle_seconds", "max_connection_age_seconds"])
def test_an_idle_or_old_connection_gets_a_goaway(option: str) -> None:
    with connected(**{option: 0.3}) as client:
        until(lambda: client.told_to_leave, 10, "a word to the client")


def test_a_connection_over_the_limit_is_closed() -> None:
    with serving(LoopbackModel(), max_connections=3) as served, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(RawConnection(served.port)) for _ in range(3)]
        assert all(answered(client) for client in clients)
        with contextlib.suppress(OSError):
            one_more = stack.enter_context(RawConnection(served.port))
            until(lambda: one_more.closed, 10, "the end of the fourth")
        assert all(answered(client) for client in clients)
        clients[0].close()
        until(lambda: answered(stack.enter_context(RawConnection(served.port))), 10, "a place that was given back")


@pytest.mark.parametrize("begun", [b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"], ids=["nothing", "no settings"])
def test_a_connection_that_does_not_become_http2_in_time_is_closed(begun: bytes) -> None:
    with (
        serving(LoopbackModel(), handshake_seconds=0.3) as served,
        socket.create_connection(("127.0.0.1", served.port), timeout=10) as silent,
    ):
        silent.sendall(begun)
        with contextlib.suppress(ConnectionResetError):
            while silent.recv(1 << 16):  # the server sends its own settings first
                pass


def test_a_call_over_the_limit_of_its_connection_is_rejected() -> None:
    """Only a client that breaks HTTP/2's rules sends it."""
    with connected(max_connection_calls=3, max_in_flight=12) as client:
        assert answered(client)
        waiting = [client.call(f"/{SERVICE}/ModelStreamInfer") for _ in range(3)]
        refused = client.call(f"/{SERVICE}/ModelStreamInfer")
        until(lambda: refused in client.ended, 10, "the end of a call too many")
        assert not client.ended.intersection(waiting)


@pytest.mark.long
def test_calls_within_the_limit_of_a_connection_are_never_refused_and_more_wait_in_the_client() -> None:
    """A refused call ends with UNAVAILABLE in clients that do not repeat it by themselves."""
    with serving(LoopbackModel()) as served:
        message, held = infer_request(x=X).SerializeToString(), TransportOptions().max_connection_calls
        took = closed_loop(served.port, f"/{SERVICE}/ModelInfer", message, held, 2.0)  # raises if a call is refused
        assert len(took) > 500
        waiting = [served.stub("ModelInfer").future(infer_request(x=X), timeout=60) for _ in range(5 * held)]
        assert all(call.result(60) for call in waiting)


def test_too_many_calls_that_wait_for_grpcs_thread_are_rejected() -> None:
    """gRPC queues the calls that its one thread has not reached; that queue must be bounded."""
    begun, go = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert go.wait(30)

    with serving(LoopbackModel(), tokens=SlowTokens(wait), max_undelivered_calls=4) as served:
        infer = served.stub("ModelInfer")
        calls = [infer.future(infer_request(x=X), timeout=30, metadata=SOME_TOKEN) for _ in range(60)]
        assert begun.wait(30)
        try:
            until(lambda: sum(call.done() for call in calls) > 45, 10, "the refusal of most")
        finally:
            go.set()
