"""Attacks on the HTTP port of a running server: /livez responds within a second, and memory is freed afterwards."""

import contextlib
import random
import re
import selectors
import socket
import struct
import time
from collections.abc import Iterator

import pytest
from attacked import HealthMonitor
from waiting import until

pytestmark = pytest.mark.hostile
MANY = 500
ATTACK_SECONDS = 4.0


@contextlib.contextmanager
def connections(watched: HealthMonitor, count: int = MANY) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        where = ("127.0.0.1", watched.server.ports()[1])
        yield [stack.enter_context(socket.create_connection(where, timeout=10)) for _ in range(count)]


def closed(peer: socket.socket) -> bool:
    """Return whether the server has closed the connection, after reading everything it sent."""
    peer.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        try:
            while peer.recv(1 << 16):
                pass
        except OSError as error:
            if isinstance(error, BlockingIOError):
                raise
        return True
    return False


def everything_answers(watched: HealthMonitor) -> None:
    for page in ("/livez", "/readyz", "/metrics", "/status.json", "/"):
        begun = time.monotonic()
        assert watched.server.get(page)[0] == 200
        assert time.monotonic() - begun < 5, page


def refusals(watched: HealthMonitor, reason: str) -> float:
    return watched.server.metric(f'bf16kit_refused_total{{reason="{reason}"}}')


def test_500_silent_connections_use_no_threads_block_no_request_and_are_closed(watched: HealthMonitor) -> None:
    threads = watched.server.status("Threads")
    with connections(watched) as peers:
        everything_answers(watched)
        assert watched.server.status("Threads") <= threads + 2
        until(lambda: all(closed(peer) for peer in peers), 30, "every silent connection closed")
    assert refusals(watched, "http_connections") >= MANY - 256


def test_slowloris_is_cut_off_at_the_request_timeout(watched: HealthMonitor) -> None:
    """500 connections send a byte of a header now and then, for longer than a request may take."""
    with connections(watched) as peers:
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\nX-Slow: ")

        def every_one_is_cut_off() -> bool:
            for peer in peers:
                with contextlib.suppress(OSError):
                    peer.setblocking(False)
                    peer.send(b"a")
            return all(closed(peer) for peer in peers)

        everything_answers(watched)
        until(every_one_is_cut_off, 30, "every slow connection cut off")
    assert refusals(watched, "http_timeout") > 0


def test_clients_that_never_read_use_little_memory_and_are_disconnected(watched: HealthMonitor) -> None:
    """Each client requests the metrics a hundred times, with the smallest receive buffer possible.

    These clients cannot see that the server has closed their connections, because they would have to read first. The
    number of the server's file descriptors shows it.
    """
    where = ("127.0.0.1", watched.server.ports()[1])
    with contextlib.ExitStack() as stack:
        peers = []
        for _ in range(MANY):
            peer = stack.enter_context(socket.socket())
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            peer.settimeout(10)
            peer.connect(where)
            with contextlib.suppress(OSError):
                peer.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
            peers.append(peer)
        everything_answers(watched)
        assert watched.server.metric("process_open_fds") > 256, "as many connected clients as the limit permits"
        until(lambda: watched.server.metric("process_open_fds") < 50, 30, "every client that never reads disconnected")
    assert watched.largest_rss < watched.before + (64 << 20), "held for those who do not read"


def test_huge_headers_are_rejected_before_they_are_stored(watched: HealthMonitor) -> None:
    """51 requests of 4 MiB in one header, 10,000 headers, or a long request line: 400 each, or reset while sending."""
    kinds = [
        b"GET / HTTP/1.1\r\nHost: x\r\nX-Huge: " + b"a" * (4 << 20) + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: a\r\n" % i for i in range(10_000)) + b"\r\n",
        b"GET /" + b"a" * (4 << 20) + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    ]
    said = set()
    for turn in range(51):
        with connections(watched, 1) as (peer,), contextlib.suppress(ConnectionError):
            with contextlib.suppress(ConnectionError):
                peer.sendall(kinds[turn % 3])
            said.add(peer.recv(12))
    assert said <= {b"HTTP/1.1 400", b""}
    assert b"HTTP/1.1 400" in said
    everything_answers(watched)
    assert watched.largest_rss < watched.before + (32 << 20), "held for huge headers"


def test_20000_random_byte_strings_get_a_response_or_a_closed_connection(watched: HealthMonitor) -> None:
    """Noise, and requests with bytes changed, removed and repeated, twenty per connection."""
    random_ = random.Random(8)
    left, connected, answered = 20_000, 0, set[bytes]()
    while left:
        with connections(watched, 1) as (peer,):
            connected += 1
            peer.settimeout(0.5)
            batch = [_noise(random_) for _ in range(min(left, 20))]
            left -= len(batch)
            with contextlib.suppress(OSError):
                peer.sendall(b"".join(batch))
                peer.shutdown(socket.SHUT_WR)
                received = b""
                while more := peer.recv(1 << 16):
                    received += more
                answered.update(re.findall(rb"HTTP/1\.1 (\d{3}) ", received))
    assert connected == 1000
    assert not [status for status in answered if status[:1] == b"5" and status not in (b"501", b"503")]
    assert {b"200", b"400"} <= answered
    everything_answers(watched)


def _noise(random_: random.Random) -> bytes:
    if random_.random() < 0.3:
        return random_.randbytes(random_.randrange(1, 200))
    request = bytearray(
        b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: application/openmetrics-text;version=1.0.0\r\n"
        b"Content-Length: 0\r\n\r\n"
    )
    for _ in range(random_.randrange(4)):
        at = random_.randrange(len(request))
        kind = random_.randrange(3)
        if kind == 0:
            request[at] = random_.randrange(256)
        elif kind == 1:
            del request[at : at + random_.randrange(1, 8)]
        else:
            request[at:at] = request[at : at + random_.randrange(1, 40)]
    return bytes(request)


def test_churn_and_resets_leave_nothing_behind(watched: HealthMonitor) -> None:
    """Open connections and reset them at once, some with half a request, as fast as one process can."""
    before = watched.server.metric("process_open_fds")
    end = time.monotonic() + ATTACK_SECONDS
    count = 0
    while time.monotonic() < end:
        with connections(watched, 50) as peers:
            for index, peer in enumerate(peers):
                if index % 2:
                    with contextlib.suppress(OSError):
                        peer.sendall(b"GET /metrics HTTP/1.1\r\nHost:"[: index % 29])
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            count += len(peers)
    assert count > 1000
    until(lambda: watched.server.metric("process_open_fds") <= before + 2, 30, "file descriptors back")
    everything_answers(watched)


def test_a_flood_of_requests_does_not_delay_a_probe(watched: HealthMonitor) -> None:
    """Sixty connections request the metrics without pause, each time with another Accept header."""
    with connections(watched, 60) as peers, selectors.DefaultSelector() as ready:
        for peer in peers:
            peer.setblocking(False)
            ready.register(peer, selectors.EVENT_READ | selectors.EVENT_WRITE)
        end, asked = time.monotonic() + ATTACK_SECONDS, 0
        while time.monotonic() < end:
            for key, _ in ready.select(1):
                asking = key.fileobj
                assert isinstance(asking, socket.socket)
                with contextlib.suppress(BlockingIOError):
                    asked += 1
                    asking.send(b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: text/plain;version=1.%d\r\n\r\n" % asked)
                    asking.recv(1 << 16)
    assert asked > 1000


def test_a_flood_of_pipelined_probes_does_not_delay_others(watched: HealthMonitor) -> None:
    """200 connections send the probe fifty times in a packet, again and again."""
    end, sent = time.monotonic() + ATTACK_SECONDS, 0
    with connections(watched, 200) as peers:
        for peer in peers:
            peer.setblocking(False)
        while time.monotonic() < end:
            for peer in peers:
                with contextlib.suppress(OSError):
                    sent += peer.send(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n" * 50)
                with contextlib.suppress(OSError):
                    peer.recv(1 << 16)
    assert sent > 1_000_000
    assert len(watched.seconds) > 25 / watched.patience_s, "most took a small part of the time that one may take"
