"""A gRPC client that may break any rule: a test chooses which HTTP/2 frames it sends, and when."""

import contextlib
import socket
import struct
import threading
from types import TracebackType
from typing import Self

from bench.serving.http2 import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    request_headers,
)  # fmt: skip

_CANCEL = 8


class RawConnection:
    """One connection. ``window`` is how many bytes of each response the server may send; 0: the client reads nothing.

    A thread acknowledges the server's settings and pings, otherwise the server would disconnect. It records which
    streams have ended, which had a compressed response, whether a GOAWAY arrived, and how many data bytes arrived.
    """

    def __init__(self, port: int, *, window: int = 65_535, answers_pings: bool = True) -> None:
        self._port = port
        self._answers_pings = answers_pings
        self._socket = socket.create_connection(("127.0.0.1", port))
        # A timeout for sending only. The socket's own timeout would also end the reader if the server sends nothing.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 30, 0))
        self._lock = threading.Lock()
        self._next = 1
        self.ended: set[int] = set()
        self.compressed: set[int] = set()
        self.told_to_leave = False
        self.received = 0
        self.closed = False
        self.send(PREFACE + frame(SETTINGS, 0, 0, struct.pack("!HI", INITIAL_WINDOW_SIZE, window)))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
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

    def call(self, path: str, message: bytes | None = None, *fields: tuple[str, str]) -> int:
        """Begin a call: send the headers with ``fields``, and all of ``message`` if there is one.

        Returns the stream's number.
        """
        stream, self._next = self._next, self._next + 2
        frames = frame(HEADERS, END_HEADERS, stream, request_headers(path, self._port, *fields))
        if message is not None:
            frames += frame(DATA, END_STREAM, stream, framed(message))
        self.send(frames)
        return stream

    def data(self, stream: int, data: bytes) -> None:
        """Send a piece of a message; the pieces together are :func:`framed` bytes."""
        self.send(frame(DATA, 0, stream, data))

    def reset(self, stream: int) -> None:
        self.send(frame(RST_STREAM, 0, stream, struct.pack("!I", _CANCEL)))

    def ping(self) -> None:
        self.send(frame(PING, 0, 0, bytes(8)))

    def take(self, stream: int, nbytes: int) -> None:
        """Let the server send ``nbytes`` more of the response."""
        self.send(frame(WINDOW_UPDATE, 0, stream, struct.pack("!I", nbytes)))

    def _read(self) -> None:
        stream = self._socket.makefile("rb")
        with contextlib.suppress(OSError, ValueError):
            while len(header := stream.read(9)) == 9:  # a connection can end within a frame
                size, kind, flags = int.from_bytes(header[:3], "big"), header[3], header[4]
                number = int.from_bytes(header[5:], "big") & 0x7FFFFFFF
                body = stream.read(size)
                self.received += size if kind == DATA else 0
                self._take(kind, flags, number, body)
        self.closed = True

    def _take(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            self.send(frame(SETTINGS, ACK, 0, b""))
        elif kind == PING and not flags & ACK and self._answers_pings:
            self.send(frame(PING, ACK, 0, body))
        elif kind == GOAWAY:
            self.told_to_leave = True
        if kind == DATA and body[:1] == b"\1":  # the flag is a message's first byte; one frame has it all
            self.compressed.add(stream)
        if kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
            self.ended.add(stream)


def framed(message: bytes) -> bytes:
    """Return ``message`` as gRPC sends it: a flag (uncompressed), the length, the message."""
    return b"\0" + struct.pack("!I", len(message)) + message
