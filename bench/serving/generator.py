"""The process that sends open-loop load, see :mod:`bench.serving.openloop`: plain HTTP/2, never blocked on a server.

As a gRPC client does, it has at most as many calls open on a connection as the server allows. The others wait here, and
end as "not sent" after :data:`PATIENCE_S`, like a client whose deadline has passed.
"""

from __future__ import annotations

import json
import random
import selectors
import socket
import struct
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import grpc

from bench.serving import wire
from bench.serving.http2 import (
    ACK,
    DATA,
    END_STREAM,
    GOAWAY,
    HEADERS,
    LARGEST_WINDOW,
    MAX_CONCURRENT_STREAMS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    request_frames,
    request_headers,
    settings,
    window_update,
)  # fmt: skip

# How a call may end without a status; the first two mean that no server has seen it.
NOT_SENT, NOT_PROCESSED, RESET, CUT_OFF, LOST = "not sent", "not processed", "reset", "cut off", "lost"
CODES = {code.value[0]: code.name for code in grpc.StatusCode}
_FRAME_HEADER = 9
_WINDOW = 65_535  # of a connection, until the server says more
PATIENCE_S = 1.0  # for a free stream; calls that wait longer were not worth sending
_LAST_WAIT_S = 10.0  # for answers, after the last call was sent
_REMEMBERED = 100  # different answers and texts of errors


class _Ledger:
    """How calls ended."""

    def __init__(self, messages: int) -> None:
        self.ended: dict[str, list[tuple[float, float, float]]] = {}
        self.answers = [Counter[bytes]() for _ in range(messages)]
        self.said: dict[str, Counter[str]] = {}

    def end(self, status: str, due: float, text: str = "", *, sent: float | None = None) -> None:
        now = time.monotonic()
        self.ended.setdefault(status, []).append((due, now - due, 0.0 if sent is None else now - sent))
        if text:
            _count(self.said.setdefault(status, Counter()), text)

    def answer(self, message: int, data: bytes) -> None:
        _count(self.answers[message], data)

    def report(self) -> dict[str, Any]:
        answers = [{answer.hex(): count for answer, count in of.items()} for of in self.answers]
        offered = sum(len(calls) for calls in self.ended.values())
        return {"offered": offered, "ended": self.ended, "answers": answers, "said": self.said}


def _count(counter: Counter[Any], item: Any) -> None:
    if item in counter or len(counter) < _REMEMBERED:
        counter[item] += 1


class _Connection:
    """One connection, never blocked on: what cannot be sent yet waits in ``outgoing``."""

    def __init__(self, port: int, messages: Sequence[bytes], ledger: _Ledger) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.outgoing = bytearray(PREFACE + settings() + window_update(LARGEST_WINDOW - _WINDOW))
        # By stream: the message's number, when the call was due, and when it was sent.
        self.open: dict[int, tuple[int, float, float]] = {}
        self.waiting: deque[tuple[int, float]] = deque()  # due, and no stream or window to send them
        self.leaving = self.closed = False
        self._ledger = ledger
        self._headers = request_headers(wire.INFER, port)
        self._messages = messages
        self._window = _WINDOW
        self._streams = sys.maxsize
        self._next = 1
        self._data: dict[int, bytes] = {}
        self._incoming = bytearray()

    def send(self, message: int, due: float) -> None:
        """One call, or as soon as the server allows it."""
        if self.leaving:
            self._ledger.end(NOT_SENT, due)
            return
        self.waiting.append((message, due))
        self.flush()

    def flush(self) -> None:
        now = time.monotonic()
        while self.waiting and self.waiting[0][1] < now - PATIENCE_S:
            self._ledger.end(NOT_SENT, self.waiting.popleft()[1])
        while self.waiting and len(self.open) < self._streams:
            size = len(self._messages[self.waiting[0][0]]) + 5
            if size > self._window:
                break
            message, due = self.waiting.popleft()
            self.open[self._next] = message, due, now
            self.outgoing += request_frames(self._next, self._headers, self._messages[message])
            self._window -= size
            self._next += 2
        if self.closed:
            return
        try:
            del self.outgoing[: self.socket.send(self.outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            self._cut_off()

    def receive(self) -> None:
        try:
            chunk = self.socket.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            self._cut_off()
            return
        self._incoming += chunk
        start = 0
        while len(self._incoming) - start >= _FRAME_HEADER:
            end = start + _FRAME_HEADER + int.from_bytes(self._incoming[start : start + 3])
            if end > len(self._incoming):
                break
            self._take(start, end)
            start = end
        del self._incoming[:start]

    def give_up(self) -> None:
        """Nobody waits any longer."""
        self._end_all(LOST)

    def _take(self, start: int, end: int) -> None:
        kind, flags = self._incoming[start + 3], self._incoming[start + 4]
        stream = int.from_bytes(self._incoming[start + 5 : start + 9])
        payload = bytes(self._incoming[start + _FRAME_HEADER : end])
        if kind == DATA:
            self._data[stream] = self._data.get(stream, b"") + payload
        elif kind == WINDOW_UPDATE and stream == 0:
            self._window += int.from_bytes(payload)
        elif kind in (SETTINGS, PING) and not flags & ACK:
            if kind == SETTINGS:
                self._streams = dict(struct.iter_unpack(">HI", payload)).get(MAX_CONCURRENT_STREAMS, self._streams)
            self.outgoing += frame(kind, ACK, 0, payload if kind == PING else b"")
        elif kind == GOAWAY:
            self._go_away(int.from_bytes(payload[:4]))
        elif stream in self.open and (kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM)):
            self._end(stream, kind, payload)

    def _end(self, stream: int, kind: int, payload: bytes) -> None:
        message, due, sent = self.open.pop(stream)
        data = self._data.pop(stream, b"")
        if kind == RST_STREAM:
            self._ledger.end(RESET, due, f"HTTP/2 error {int.from_bytes(payload)}", sent=sent)
            return
        code = CODES[int(_trailer(payload, b"grpc-status"))]
        self._ledger.end(code, due, _trailer(payload, b"grpc-message"), sent=sent)
        if code == "OK":
            self._ledger.answer(message, data)

    def _go_away(self, last: int) -> None:
        """The server takes no call after stream ``last``, and these two were never looked at."""
        self.leaving = True
        for stream in [stream for stream in self.open if stream > last]:
            self._ledger.end(NOT_PROCESSED, self.open.pop(stream)[1])
        for _, due in self.waiting:
            self._ledger.end(NOT_SENT, due)
        self.waiting.clear()

    def _cut_off(self) -> None:
        self.leaving = self.closed = True
        self._end_all(CUT_OFF)

    def _end_all(self, status: str) -> None:
        for _, due, sent in self.open.values():
            self._ledger.end(status, due, sent=sent)
        for _, due in self.waiting:
            self._ledger.end(NOT_SENT, due)
        self.open.clear()
        self.waiting.clear()


def _trailer(block: bytes, name: bytes) -> str:
    """A header field of gRPC's server, which writes names and values out, since it may keep no table: RFC 7541 §6.2."""
    at = block.find(bytes((len(name),)) + name)
    if at < 0:
        return ""
    at += 1 + len(name)
    size = block[at]
    if size == 127:  # a text of up to 254 bytes
        at, size = at + 1, 127 + (block[at + 1] & 127)
    return block[at + 1 : at + 1 + size].decode("ascii", "replace")


def plan(messages: int, rate: float, seconds: float, seed: int | None = None) -> list[tuple[float, int]]:
    """Of each call, the seconds after the first that it is due, and which message it is: see
    :class:`bench.serving.openloop.Offering`."""
    total = round(rate * seconds)
    if seed is None:
        return [(number / rate, number % messages) for number in range(total)]
    chance, due, calls = random.Random(seed), 0.0, []  # noqa: S311 - arrivals, not secrets
    for _ in range(total):
        calls.append((due, chance.randrange(messages)))
        due += chance.expovariate(rate)
    return calls


def _run(port: int, messages: Sequence[bytes], calls: Sequence[tuple[float, int]], count: int) -> dict[str, Any]:
    ledger = _Ledger(len(messages))
    connections = [_Connection(port, messages, ledger) for _ in range(count)]
    chooser = selectors.DefaultSelector()
    for connection in connections:
        chooser.register(connection.socket, selectors.EVENT_READ, connection)
    started = time.monotonic()
    end, sent, total = started + calls[-1][0], 0, len(calls)
    while sent < total or any(c.open or c.waiting for c in connections):
        now = time.monotonic()
        if now > end + _LAST_WAIT_S or all(c.closed for c in connections):
            break
        while sent < total and started + calls[sent][0] <= now:
            connections[sent % count].send(calls[sent][1], started + calls[sent][0])
            sent += 1
        pause = 0.05 if sent >= total else max(0.0, started + calls[sent][0] - now)
        for key, _ in chooser.select(min(pause, 0.05)):
            key.data.receive()
            if key.data.closed:
                chooser.unregister(key.fileobj)
        for connection in connections:
            if connection.outgoing or connection.waiting:
                connection.flush()
    for connection in connections:
        connection.give_up()
    return ledger.report()


if __name__ == "__main__":
    port, rate, seconds, count, *seed = sys.argv[1:]
    texts = sys.stdin.read().split()
    calls = plan(len(texts), float(rate), float(seconds), *map(int, seed))
    print(json.dumps(_run(int(port), [bytes.fromhex(text) for text in texts], calls, int(count))))
