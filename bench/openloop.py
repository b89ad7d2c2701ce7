"""Open-loop load: calls are sent when they are due, whether or not the ones before have been answered.

A closed loop waits for a slow server, and so never shows what happens to those who do not. Here every call's time
counts from the moment it was due, so that a generator or a connection that falls behind is part of what is measured. It
runs as a process of its own, over several plain HTTP/2 connections, and costs about 40 µs per call.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from bench import wire
from bench.http2 import (
    ACK,
    DATA,
    END_STREAM,
    GOAWAY,
    HEADERS,
    LARGEST_WINDOW,
    PING,
    PREFACE,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    request_frames,
    request_headers,
    settings,
    window_update,
)  # fmt: skip

_FRAME_HEADER = 9
_WINDOW = 65_535  # of a connection, until the server says more
_LAST_WAIT_S = 10.0  # for answers, after the last call was sent


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a block of calls; times in seconds, from the moment when each was due."""

    offered: int
    answered: list[float]
    refused: list[float]
    lost: int  # neither, ten seconds after the end

    def percentile(self, of: str, share: float) -> float:
        """``of``: answered or refused. NaN when there are none."""
        times = sorted(self.answered if of == "answered" else self.refused)
        return times[min(len(times) - 1, int(len(times) * share))] if times else float("nan")


def offer(port: int, message: bytes, *, rate: float, seconds: float, connections: int = 16) -> Outcome:
    """Send ``message`` to ModelInfer ``rate`` times a second for ``seconds``, from another process."""
    command = [sys.executable, "-m", "bench.openloop", str(port), str(rate), str(seconds), str(connections)]
    done = subprocess.run(command, input=message.hex(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the load generator failed: {done.stderr[-2000:]}")
    return Outcome(**json.loads(done.stdout))


# --- inside the generator's process -----------------------------------------------------------------------------------


class _Connection:
    """One connection, never blocked on: what cannot be sent yet waits in ``outgoing``."""

    def __init__(self, port: int, message: bytes) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.outgoing = bytearray(PREFACE + settings() + window_update(LARGEST_WINDOW - _WINDOW))
        self.due: dict[int, float] = {}  # by stream
        self.waiting: list[float] = []  # due, and no window to send them
        self.answered: list[float] = []
        self.refused: list[float] = []
        self._headers = request_headers(wire.INFER, port)
        self._message = message
        self._window = _WINDOW
        self._next = 1
        self._with_data: set[int] = set()
        self._incoming = bytearray()

    def send(self, due: float) -> None:
        """One call, or as soon as the window allows it."""
        self.waiting.append(due)
        self.flush()

    def flush(self) -> None:
        size = len(self._message) + 5
        while self.waiting and self._window >= size:
            self.due[self._next] = self.waiting.pop(0)
            self.outgoing += request_frames(self._next, self._headers, self._message)
            self._window -= size
            self._next += 2
        with contextlib.suppress(BlockingIOError):
            del self.outgoing[: self.socket.send(self.outgoing)]

    def receive(self) -> None:
        try:
            chunk = self.socket.recv(1 << 18)
        except BlockingIOError:
            return
        if not chunk:
            raise ConnectionError("the server closed the connection")
        self._incoming += chunk
        now, start = time.perf_counter(), 0
        while len(self._incoming) - start >= _FRAME_HEADER:
            end = start + _FRAME_HEADER + int.from_bytes(self._incoming[start : start + 3])
            if end > len(self._incoming):
                break
            self._take(start, end, now)
            start = end
        del self._incoming[:start]

    def _take(self, start: int, end: int, now: float) -> None:
        kind, flags = self._incoming[start + 3], self._incoming[start + 4]
        stream = int.from_bytes(self._incoming[start + 5 : start + 9])
        if kind == DATA:
            self._with_data.add(stream)  # an error has none
        elif kind == WINDOW_UPDATE and stream == 0:
            self._window += int.from_bytes(self._incoming[start + _FRAME_HEADER : end])
        elif kind in (SETTINGS, PING) and not flags & ACK:
            payload = bytes(self._incoming[start + _FRAME_HEADER : end]) if kind == PING else b""
            self.outgoing += frame(kind, ACK, 0, payload)
        elif kind == GOAWAY:
            raise ConnectionError("the server sends the connection away")
        elif kind == HEADERS and flags & END_STREAM and stream in self.due:
            took = now - self.due.pop(stream)
            (self.answered if stream in self._with_data else self.refused).append(took)
            self._with_data.discard(stream)


def _run(port: int, message: bytes, rate: float, seconds: float, count: int) -> dict[str, Any]:
    connections = [_Connection(port, message) for _ in range(count)]
    chooser = selectors.DefaultSelector()
    for connection in connections:
        chooser.register(connection.socket, selectors.EVENT_READ, connection)
    begun = time.perf_counter()
    end, sent, total = begun + seconds, 0, round(rate * seconds)
    while sent < total or any(c.due or c.waiting for c in connections):
        now = time.perf_counter()
        if now > end + _LAST_WAIT_S:
            break
        while sent < total and begun + sent / rate <= now:
            connections[sent % count].send(begun + sent / rate)
            sent += 1
        pause = 0.05 if sent >= total else max(0.0, begun + sent / rate - now)
        for key, _ in chooser.select(min(pause, 0.05)):
            key.data.receive()
        for connection in connections:
            if connection.outgoing or connection.waiting:
                connection.flush()
    return {
        "offered": total,
        "answered": [took for c in connections for took in c.answered],
        "refused": [took for c in connections for took in c.refused],
        "lost": total - sum(len(c.answered) + len(c.refused) for c in connections),
    }


if __name__ == "__main__":
    print(
        json.dumps(
            _run(
                int(sys.argv[1]),
                bytes.fromhex(sys.stdin.read()),
                float(sys.argv[2]),
                float(sys.argv[3]),
                int(sys.argv[4]),
            )
        )
    )
