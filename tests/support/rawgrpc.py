"""A gRPC client that keeps none of the rules: frames of HTTP/2 written by hand, sent when and as a test likes."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from types import TracebackType

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_INITIAL_WINDOW_SIZE = 4


class RawConnection:
    """One connection. ``window`` is how much of each response the server may send: 0 = this client reads nothing.

    A thread answers the server's settings and pings, as every connection that wants to live must, and remembers which
    streams have ended.
    """

    def __init__(self, port: int, *, window: int = 65_535) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self._lock = threading.Lock()
        self._next = 1
        self.ended: set[int] = set()
        self.closed = False
        self.send(_PREFACE + _frame(_SETTINGS, 0, 0, struct.pack("!HI", _INITIAL_WINDOW_SIZE, window)))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> RawConnection:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def send(self, data: bytes) -> None:
        with self._lock:
            self._socket.sendall(data)

    def call(self, path: str, message: bytes | None = None) -> int:
        """Begin a call: its headers, and the whole of ``message`` where there is one. Returns the stream's number."""
        stream, self._next = self._next, self._next + 2
        fields = (
            (":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost"),
            ("te", "trailers"), ("content-type", "application/grpc"),
        )  # fmt: skip
        block = b"".join(b"\0" + _text(name) + _text(value) for name, value in fields)
        frames = _frame(_HEADERS, _END_HEADERS, stream, block)
        if message is not None:
            frames += _frame(_DATA, _END_STREAM, stream, framed(message))
        self.send(frames)
        return stream

    def data(self, stream: int, data: bytes) -> None:
        """A piece of a message, of :func:`framed` bytes."""
        self.send(_frame(_DATA, 0, stream, data))

    def reset(self, stream: int) -> None:
        self.send(_frame(_RST, 0, stream, struct.pack("!I", 8)))

    def _read(self) -> None:
        stream = self._socket.makefile("rb")
        with contextlib.suppress(OSError, ValueError):
            while header := stream.read(9):
                size, kind, flags = int.from_bytes(header[:3], "big"), header[3], header[4]
                number = int.from_bytes(header[5:], "big") & 0x7FFFFFFF
                body = stream.read(size)
                if kind == _SETTINGS and not flags & _ACK:
                    self.send(_frame(_SETTINGS, _ACK, 0, b""))
                elif kind == _PING and not flags & _ACK:
                    self.send(_frame(_PING, _ACK, 0, body))
                elif kind == _RST or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
                    self.ended.add(number)
        self.closed = True


def framed(message: bytes) -> bytes:
    """``message`` as gRPC sends it: uncompressed, after its length."""
    return b"\0" + struct.pack("!I", len(message)) + message


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + body


def _text(text: str) -> bytes:
    """A string of HPACK, as it is: shorter than 127 bytes."""
    data = text.encode()
    assert len(data) < 127
    return bytes((len(data),)) + data
