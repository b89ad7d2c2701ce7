"""A server process under attack, and a client that asks it all the time whether it is well."""

import contextlib
import http.client
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import figures
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from serverprocess import ServerProcess
from waiting import slowdown, until

GROWTH = 1.1  # the most memory that the server may hold after an attack ÷ its memory before
FRAGMENTS = 16 << 20  # bytes by which a small server may exceed that: the heap's holes
PATIENCE_S = 1.0  # a healthy server responds to a health check within this time
Ask = Callable[[float], str]  # within so many seconds; returns what is wrong, "" if nothing is


@contextmanager
def over_grpc(server: ServerProcess) -> Iterator[Ask]:
    with grpc.insecure_channel(server.target) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        stub.Check(health_pb2.HealthCheckRequest(), timeout=30)

        def ask(timeout: float) -> str:
            try:
                status = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout).status
            except grpc.RpcError as error:
                return f"{error.code()}: {error.details()}"
            return "" if status == health_pb2.HealthCheckResponse.SERVING else f"health status {status}"

        yield ask


@contextmanager
def over_http(server: ServerProcess) -> Iterator[Ask]:
    """Probe /livez, on a new connection each time, as the kubelet does."""
    port = server.ports()[1]

    def ask(timeout: float) -> str:
        try:
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)) as connection:
                connection.request("GET", "/livez")
                answer = connection.getresponse()
                answer.read()
        except (OSError, http.client.HTTPException) as error:
            return f"{type(error).__name__}: {error}"
        return "" if answer.status == 200 else f"/livez answered {answer.status}"

    yield ask


class HealthMonitor:
    """Checks a server's health many times a second, each time for up to ``patience_s``.

    That time is longer if the machine is busy with other programs when the attack begins, by :func:`slowdown`.
    With ``repeat``, a check that finds a problem is repeated after 10 ms until then. ``seconds`` is how long each check
    took, ``failures`` has the last problem of each that ended with one, ``before`` and ``largest_rss`` are bytes.
    """

    def __init__(
        self,
        server: ServerProcess,
        asking: Callable[[ServerProcess], contextlib.AbstractContextManager[Ask]] = over_grpc,
        patience_s: float = PATIENCE_S,
        *,
        repeat: bool = True,
    ) -> None:
        self.server = server
        self._asking, self.patience_s, self._repeat = asking, patience_s * slowdown(), repeat
        self.before = self.rss()
        self.largest_rss = 0
        self._stop = threading.Event()
        self.seconds: list[float] = []
        self.failures: list[str] = []

    def rss(self) -> int:
        """Return the server's RSS in bytes; 0 if the process has ended and nothing has waited for it yet."""
        return self.server.status("VmRSS") << 10

    @contextmanager
    def running(self) -> Iterator[Self]:
        """Fail if the server ends, is not well at some check, or holds too much memory, during the block or after."""
        thread = threading.Thread(target=self._check_repeatedly, daemon=True)
        thread.start()
        try:
            yield self
            until(lambda: self.seconds, what="a health check")
        finally:
            self._stop.set()
            thread.join()
            slowest = max(self.seconds, default=0)
            figures.watched(len(self.seconds), slowest, self.before, self.largest_rss, self.rss())
        assert self.server.process.poll() is None, self.server.log[-2000:]
        assert self.failures == [], f"{self.failures} of {len(self.seconds)}"
        assert self._repeat or slowest < self.patience_s, f"the slowest check took {slowest:.2f} s"
        self.server.check_memory()
        most = max(self.before * GROWTH, self.before + FRAGMENTS)
        until(lambda: self.rss() <= most, 30, lambda: f"RSS of {self.before >> 20} MiB, now {self.rss() >> 20}, back")

    def _check_repeatedly(self) -> None:
        with self._asking(self.server) as ask:
            while not self._stop.wait(0.05 if self._repeat else 0.02):
                started = time.monotonic()
                if problem := self._check(ask):
                    self.failures.append(problem)
                self.seconds.append(time.monotonic() - started)
                self.largest_rss = max(self.largest_rss, self.rss())

    def _check(self, ask: Ask) -> str:
        end = time.monotonic() + self.patience_s
        problem = ask(self.patience_s)
        while self._repeat and problem and (remaining_s := end - time.monotonic()) > 0:
            self._stop.wait(0.01)
            problem = ask(remaining_s)
        return problem


class Target:
    """The server under attack."""

    def __init__(self, process: ServerProcess) -> None:
        self.process = process
        self.port = process.ports()[0]
        self.address = process.target

    def rss(self) -> int:
        return self.process.status("VmRSS") << 10

    def stays_healthy(self, patience_s: float = PATIENCE_S) -> contextlib.AbstractContextManager[HealthMonitor]:
        return HealthMonitor(self.process, patience_s=patience_s).running()
