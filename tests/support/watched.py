"""Watch a server under attack: every probe must succeed within a second; memory must stay bounded and be freed."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from types import TracebackType

import figures
from serverprocess import ServerProcess
from waiting import until

WITHIN_SECONDS = 1.0
GROWTH = 1.10
_PAUSE_SECONDS = 0.02


class Watched:
    """A context manager. At its end it waits until the memory is freed, and fails if a probe failed or was late."""

    def __init__(self, server: ServerProcess, probe: str = "/livez") -> None:
        self.server = server
        self.slowest = 0.0
        self.probes = 0
        self.failures: list[str] = []
        self._probe = probe
        self._port = server.ports()[1]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watching", daemon=True)
        self.before = 0
        self.highest = 0

    @property
    def http_port(self) -> int:
        return self._port

    def __enter__(self) -> Watched:
        self._warm()
        self.before = self.server.status("VmRSS")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        rss = self.server.status("VmRSS")
        figures.watched(self.probes, self.slowest, self.before << 10, self.highest << 10, rss << 10)
        if error is not None:
            return
        assert self.server.process.poll() is None, self.server.log
        assert self.probes > 0
        assert self.failures == [], f"{self.failures} of {self.probes}"
        assert self.slowest < WITHIN_SECONDS, f"the slowest of {self.probes} probes took {self.slowest:.2f} s"
        until(
            self._memory_is_back, 30, f"RSS of {self.before} kB, now {self.server.status('VmRSS')} kB, back within 10 %"
        )
        self.server.check_memory()
        assert "Traceback" not in self.server.log

    def _warm(self) -> None:
        """Cause one-time allocations, so that they do not count as growth: pages, and the heap for 256 connections."""
        self.server.get("/")
        for _ in range(3):
            with contextlib.ExitStack() as stack:
                for _ in range(256):
                    peer = stack.enter_context(socket.create_connection(("127.0.0.1", self._port), timeout=10))
                    peer.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        self.server.get("/metrics")

    def _memory_is_back(self) -> bool:
        return self.server.status("VmRSS") <= self.before * GROWTH

    def _watch(self) -> None:
        while not self._stop.is_set():
            started = time.monotonic()
            try:
                self._ask()
            except (OSError, http.client.HTTPException) as error:
                self.failures.append(f"{type(error).__name__}: {error}, after {time.monotonic() - started:.2f} s")
            self.slowest = max(self.slowest, time.monotonic() - started)
            self.highest = max(self.highest, self.server.status("VmRSS"))
            self.probes += 1
            self._stop.wait(_PAUSE_SECONDS)

    def _ask(self) -> None:
        """Probe the server once, on a new connection each time, as the kubelet does."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5 * WITHIN_SECONDS)
        with contextlib.closing(connection):
            connection.request("GET", self._probe)
            answer = connection.getresponse()
            answer.read()
            if answer.status != 200:
                self.failures.append(f"{self._probe} answered {answer.status}")
