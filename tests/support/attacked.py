"""A server process under attack, and a client that checks its health all the time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import figures
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from serverprocess import ServerProcess
from waiting import until

GROWTH = 1.1  # the most memory that the server may hold after an attack ÷ its memory before
PATIENCE_S = 1.0  # a healthy server responds to a health check within this time


class HealthMonitor:
    """Checks the server's health every 50 ms. A call that fails is repeated after 10 ms, for up to ``patience_s``.

    ``seconds`` is how long each check took. ``failures`` has the last error of each check that did not find it
    SERVING within that time. ``largest_rss`` is the largest RSS seen.
    """

    def __init__(self, target: str, rss: Callable[[], int], patience_s: float) -> None:
        self._target = target
        self._patience_s = patience_s
        self._rss = rss
        self.largest_rss = 0  # bytes
        self._stop = threading.Event()
        self.seconds: list[float] = []
        self.failures: list[str] = []
        self._thread = threading.Thread(target=self._check_repeatedly, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _check_repeatedly(self) -> None:
        with grpc.insecure_channel(self._target) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            stub.Check(health_pb2.HealthCheckRequest(), timeout=30)
            while not self._stop.wait(0.05):
                started, problem = time.monotonic(), "no answer"
                while (remaining_s := started + self._patience_s - time.monotonic()) > 0:
                    try:
                        status = stub.Check(health_pb2.HealthCheckRequest(), timeout=remaining_s).status
                        if status == health_pb2.HealthCheckResponse.SERVING:
                            break
                        problem = f"health status {status}"
                    except grpc.RpcError as error:
                        problem = f"{error.code()}: {error.details()}"
                    self._stop.wait(0.01)
                else:
                    self.failures.append(problem)
                self.seconds.append(time.monotonic() - started)
                self.largest_rss = max(self.largest_rss, self._rss())


class Target:
    """The server under attack."""

    def __init__(self, process: ServerProcess) -> None:
        self.process = process
        self.port = process.ports()[0]
        self.address = process.target

    def rss(self) -> int:
        """Return the server's RSS in bytes; 0 if the process has ended and nothing has waited for it yet."""
        return self.process.status("VmRSS") << 10

    @contextmanager
    def stays_healthy(self, patience_s: float = PATIENCE_S) -> Iterator[HealthMonitor]:
        """Fail if the server ends, does not answer a health check with SERVING within ``patience_s``, or holds too
        much memory, during the block or after it."""
        monitor = HealthMonitor(self.address, self.rss, patience_s)
        before = self.rss()
        monitor.start()
        try:
            yield monitor
            until(lambda: monitor.seconds, what="a health check")
        finally:
            monitor.stop()
            figures.watched(
                len(monitor.seconds), max(monitor.seconds, default=0), before, monitor.largest_rss, self.rss()
            )
        assert self.process.process.poll() is None, self.process.log[-2000:]
        assert monitor.failures == [], monitor.failures
        self.process.check_memory()
        most = before * GROWTH
        until(lambda: self.rss() <= most, 30, lambda: f"RSS of {before >> 20} MiB, now {self.rss() >> 20}, back")
