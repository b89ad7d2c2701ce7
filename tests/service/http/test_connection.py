"""HTTP over a raw socket: what one connection may do, with every byte sent and received in the test."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

import pytest
from waiting import until

from service.http.connection import Limits
from service.http.pages import Page, Route, text
from service.http.server import HttpServer

LIMITS = Limits(connections=8, request_seconds=0.5, idle_seconds=0.5, response_seconds=0.5, headers=20)
LARGE = b"x" * (32 << 20)
PAGES = {
    "/livez": Route(lambda _: text(HTTPStatus.OK, "live"), probe=True),
    "/accept": Route(lambda accept: text(HTTPStatus.OK, accept)),
    "/large": Route(lambda _: Page(HTTPStatus.OK, "text/plain", LARGE)),
}


class Heard(list[str]):
    """The recorded reasons of rejections."""


@contextmanager
def serving(limits: Limits = LIMITS) -> Iterator[tuple[HttpServer, Heard]]:
    heard = Heard()
    server = HttpServer("127.0.0.1", 0, PAGES, limits=limits, on_refused=heard.append)
    server.start()
    try:
        yield server, heard
    finally:
        server.close()


def connect(server: HttpServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=30)


def everything(peer: socket.socket) -> str:
    """Return what the server sends until it closes the connection."""
    received = []
    with contextlib.suppress(ConnectionResetError):
        while more := peer.recv(1 << 16):
            received.append(more)
    return b"".join(received).decode("latin-1")


def exchange(peer: socket.socket) -> str:
    """Return the response to a probe, on a connection that stays open."""
    peer.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
    received = b""
    while not received.endswith(b"live\n"):
        received += peer.recv(1 << 16)
    return received.decode()


def ask(request: bytes, limits: Limits = LIMITS) -> tuple[str, Heard]:
    with serving(limits) as (server, heard), connect(server) as peer:
        peer.sendall(request)
        return everything(peer), heard


def status(answer: str) -> int:
    return int(answer.split()[1])


def test_requests_in_one_packet_are_answered_in_order() -> None:
    answer, _ = ask(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n" * 50 + b"GET /no HTTP/1.1\r\nHost: x\r\n\r\n")
    assert re.findall(r"HTTP/1.1 (\d+)", answer) == ["200"] * 50 + ["404"]


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_request_with_connection_close_gets_its_response_first(version: str) -> None:
    answer, _ = ask(f"GET /livez HTTP/{version}\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    assert status(answer) == 200
    assert answer.endswith("\r\n\r\nlive\n")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH", "FROB"])
def test_a_method_other_than_get_or_head_is_405_and_ends_the_connection(method: str) -> None:
    answer, heard = ask(f"{method} /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n".encode() + b"x" * 9999)
    assert status(answer) == 405
    assert "Allow: GET, HEAD\r\n" in answer
    assert heard == ["http_malformed"]


def test_a_get_with_a_body_gets_a_response_and_its_body_is_not_read() -> None:
    answer, _ = ask(b"GET /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\nGET / HTTP/1.1")
    assert re.findall(r"HTTP/1.1 (\d+)", answer) == ["200"]
    assert "Connection: close" in answer


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 a TLS hello\r\n\r\n", 400),
        (b"GET /livez\r\n\r\n", 400),
        (b"GET /livez HTTP/1.1\r\n\r\n", 400),  # no Host
        (b"GET /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"GET /livez HTTP/1.1\r\nHost: x\r\nX: a\x00b\r\n\r\n", 400),
        (b"GET /livez HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 405),
        (b"GET http://[ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 404),
        (b"GET http://elsewhere/livez?q HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 200),
    ],
)
def test_each_kind_of_malformed_request_has_its_status(request_: bytes, expected: int) -> None:
    assert status(ask(request_)[0]) == expected


def test_too_large_headers_are_431_before_they_are_complete() -> None:
    answer, heard = ask(b"GET /livez HTTP/1.1\r\nHost: x\r\n" + b"X-Large: " + b"a" * (256 << 10))
    assert (status(answer), heard) == (431, ["http_malformed"])


def test_too_many_headers_are_431() -> None:
    many = b"".join(b"X-%d: a\r\n" % i for i in range(20))
    assert status(ask(b"GET /livez HTTP/1.1\r\nHost: x\r\n" + many + b"\r\n")[0]) == 431


def test_an_incomplete_request_is_408_and_a_silent_connection_is_closed() -> None:
    answer, heard = ask(b"GET /livez HTTP/1.1\r\nHost: x\r\n")
    assert (status(answer), heard) == (408, ["http_timeout"])
    assert ask(b"") == ("", [])


def test_a_connection_that_is_idle_after_a_response_is_closed() -> None:
    answer, heard = ask(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
    assert re.findall(r"HTTP/1.1 (\d+)", answer) == ["200"]
    assert heard == []


def test_single_bytes_do_not_extend_the_request_timeout() -> None:
    """The timeout runs from the connection to the complete request, whatever arrives in between."""
    with serving() as (server, heard), connect(server) as peer:
        peer.sendall(b"GET /livez HTTP/1.1\r\nX: ")
        peer.settimeout(0.01)

        def closed() -> bool:
            try:
                peer.sendall(b"a")
                return "408" in peer.recv(1 << 16).decode()
            except TimeoutError:
                return False

        until(closed)
        assert heard == ["http_timeout"]


def test_a_client_that_does_not_read_is_disconnected_and_others_are_served() -> None:
    with serving() as (server, _), connect(server) as lazy, connect(server) as other:
        lazy.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        lazy.recv(1)
        other.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert status(everything(other)) == 200
        until(lambda: not server._open)
        assert len(everything(lazy)) < len(LARGE)


def test_a_large_response_arrives_complete() -> None:
    answer, _ = ask(b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", Limits(response_seconds=30))
    assert answer.encode().endswith(b"\r\n\r\n" + LARGE)


def test_at_the_connection_limit_the_connection_that_waited_longest_is_closed() -> None:
    limits = Limits(connections=8, request_seconds=60, idle_seconds=60)
    with contextlib.ExitStack() as stack:
        server, heard = stack.enter_context(serving(limits))
        idle = [stack.enter_context(connect(server)) for _ in range(8)]
        until(lambda: len(server._open) == 8)
        assert status(exchange(idle[1])) == 200  # since this response it has waited for less time than the rest
        until(lambda: not any(each._receiving for each in server._open))
        idle[2].sendall(b"GET /livez HT")
        until(lambda: any(each._receiving for each in server._open))
        for _ in range(3):
            assert status(exchange(stack.enter_context(connect(server)))) == 200
        assert everything(idle[0]) == everything(idle[3]) == ""
        assert status(everything(idle[2])) == 503  # its request had begun
        assert heard == ["http_connections"] * 3
        assert status(exchange(idle[1])) == 200


def test_the_page_gets_the_clients_accept_headers() -> None:
    answer, _ = ask(b"GET /accept HTTP/1.1\r\nHost: x\r\nAccept: a/b\r\nAccept: c;q=0\r\nConnection: close\r\n\r\n")
    assert answer.endswith("\r\n\r\na/b, c;q=0\n")


def test_closing_the_server_ends_connections_in_every_state() -> None:
    with serving(Limits(request_seconds=60, idle_seconds=60, response_seconds=60)) as (server, _):
        peers = [connect(server) for _ in range(4)]
        peers[1].sendall(b"GET /li")
        peers[2].sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        peers[3].sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        assert peers[2].recv(1) == peers[3].recv(1) == b"H"
    assert not server._thread.is_alive()
    for peer in peers:
        peer.close()
