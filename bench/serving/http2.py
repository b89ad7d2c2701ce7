"""A load generator that costs little: unary gRPC calls over plain HTTP/2 connections, all of them the same bytes.

grpcio's client spends 130 to 250 µs of processor time per call, taken from the server on a machine they share; this one
spends about 35 µs. It knows just enough of RFC 9113: every request is the same frames but for the stream's number,
and of a reply it checks that the stream ended after exactly the expected number of DATA bytes (an error has none).
"""

from __future__ import annotations

import selectors
import socket
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM = ACK = 1
END_HEADERS = 4
LARGEST_WINDOW = (1 << 31) - 1
_REFILL = 1 << 28  # bytes received before the connection's window is opened again
_HEADER_TABLE_SIZE, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, _MAX_FRAME_SIZE = 1, 3, 4, 5
_LARGEST_FRAME = (1 << 24) - 1
_FRAME_HEADER = 9
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_POST_OVER_HTTP = b"\x83\x86"  # RFC 7541, static table: ":method: POST", ":scheme: http"


class Connection:
    """Calls ``path`` with ``message`` on ``port`` of the loopback interface; each reply must have ``reply_bytes``.

    ``took`` is told the seconds of each call, from its first byte to its last.
    """

    def __init__(
        self, port: int, path: str, message: bytes, reply_bytes: int, took: Callable[[float], None] | None = None
    ) -> None:
        self._took = took
        self._begun: dict[int, float] = {}
        self._headers = request_headers(path, port)
        self._message = message
        self._reply_bytes = 5 + reply_bytes  # gRPC puts a flag and a length before the message
        self._received: defaultdict[int, int] = defaultdict(int)  # DATA bytes by stream
        self._next_stream = 1
        self._to_refill = 0
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(PREFACE + settings() + window_update(LARGEST_WINDOW - 65535))
        self._buffer = bytearray()

    def fileno(self) -> int:
        """For a selector."""
        return self._socket.fileno()

    def begin(self, calls: int) -> None:
        """Open so many calls."""
        self._socket.sendall(b"".join(self._request() for _ in range(calls)))

    def go_on(self, deadline: float) -> tuple[int, int]:
        """Take what has come, and before ``deadline`` open a call for each that ended: how many ended, were opened."""
        ended, answers = self._receive()
        again = ended if time.perf_counter() < deadline else 0
        answers += [self._request() for _ in range(again)]
        if answers:
            self._socket.sendall(b"".join(answers))
        return ended, again

    def close(self) -> None:
        self._socket.close()

    def _request(self) -> bytes:
        stream = self._next_stream
        self._next_stream += 2
        if self._took is not None:
            self._begun[stream] = time.perf_counter()
        return request_frames(stream, self._headers, self._message)

    def _receive(self) -> tuple[int, list[bytes]]:
        """Wait for bytes; how many calls they end, and the frames that HTTP/2 wants in answer."""
        chunk = self._socket.recv(1 << 18)
        if not chunk:
            raise ConnectionError("the server closed the connection")
        self._buffer += chunk
        ended, answers, start = 0, list[bytes](), 0
        while (end := self._frame_end(start)) is not None:
            ended += self._frame_received(start, end, answers)
            start = end
        del self._buffer[:start]
        if self._to_refill > _REFILL:
            answers.append(window_update(self._to_refill))
            self._to_refill = 0
        return ended, answers

    def _frame_end(self, start: int) -> int | None:
        """Where the frame that starts at ``start`` ends; ``None`` while it is not whole."""
        available = len(self._buffer) - start
        if available < _FRAME_HEADER:
            return None
        length = _FRAME_HEADER + int.from_bytes(self._buffer[start : start + 3])
        return start + length if length <= available else None

    def _frame_received(self, start: int, end: int, answers: list[bytes]) -> int:
        """Take note of one frame; 1 when it ends a call, and frames to send are added to ``answers``."""
        kind, flags = self._buffer[start + 3], self._buffer[start + 4]
        stream = int.from_bytes(self._buffer[start + 5 : start + 9])
        if kind == DATA:
            self._received[stream] += end - start - _FRAME_HEADER
            self._to_refill += end - start - _FRAME_HEADER
        elif kind in (SETTINGS, PING) and not flags & ACK:
            payload = bytes(self._buffer[start + _FRAME_HEADER : end]) if kind == PING else b""
            answers.append(frame(kind, ACK, 0, payload))
        elif kind in (RST_STREAM, GOAWAY):
            raise ConnectionError(f"the server ended stream {stream} with a frame of type {kind}")
        if kind != HEADERS or not flags & END_STREAM:
            return 0
        received = self._received.pop(stream, 0)
        if received != self._reply_bytes:
            raise ConnectionError(f"a reply of {received} bytes, expected {self._reply_bytes}: the call failed")
        if self._took is not None:
            self._took(time.perf_counter() - self._begun.pop(stream))
        return 1


def keep_open(connections: Sequence[Connection], in_flight: int, seconds: float) -> int:
    """Keep ``in_flight`` calls open for ``seconds``, as many on each connection as on the next, then let the last ones
    end; the number of calls that ended."""
    deadline = time.perf_counter() + seconds
    done, open_calls = 0, in_flight
    with selectors.DefaultSelector() as chooser:
        for index, connection in enumerate(connections):
            chooser.register(connection, selectors.EVENT_READ, connection)
            connection.begin(in_flight // len(connections) + (index < in_flight % len(connections)))
        while open_calls:
            for key, _ in chooser.select():
                ended, again = key.data.go_on(deadline)
                done += ended
                open_calls -= ended - again
    return done


def request_headers(path: str, port: int, *more: tuple[str, str]) -> bytes:
    """The header block of a call to ``path``: the same for every one of them."""
    fields = (
        (":path", path),
        (":authority", f"127.0.0.1:{port}"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
        *more,
    )
    return _POST_OVER_HTTP + b"".join(_literal(name, value) for name, value in fields)


def request_frames(stream: int, headers: bytes, message: bytes) -> bytes:
    """The whole of one call."""
    body = b"\0" + struct.pack(">I", len(message)) + message
    return frame(HEADERS, END_HEADERS, stream, headers) + frame(DATA, END_STREAM, stream, body)


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """RFC 9113 §4.1."""
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def settings() -> bytes:
    """Windows and frames as large as they may be, so that nothing waits; no header table, so none must be kept."""
    chosen = ((_HEADER_TABLE_SIZE, 0), (INITIAL_WINDOW_SIZE, LARGEST_WINDOW), (_MAX_FRAME_SIZE, _LARGEST_FRAME))
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", key, value) for key, value in chosen))


def window_update(size: int) -> bytes:
    """Lets the other side send ``size`` bytes more on the whole connection."""
    return frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", size))


def _literal(name: str, value: str) -> bytes:
    """RFC 7541 §6.2.2: a header field written out, not indexed, not Huffman-coded; both shorter than 127 bytes."""
    return b"\0" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()
