"""grpc.health.v1: the server as ``""`` and as the inference service, every model under its name, and the process.

The messages are grpcio-health-checking's, but its servicer is not used. It sends to watchers while it holds a lock that
a leaving watcher needs on gRPC's own thread, which blocks the whole server (grpc/grpc#43403).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from grpc_health.v1 import health_pb2

from bf16kit.messages.errors import NotFound
from bf16kit.messages.wording import quoted
from bf16kit.service.contract import Registry
from bf16kit.service.grpc.inference import CallContext

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
_log = logging.getLogger(__name__)
# The health service itself is SERVING as long as the process answers: for liveness probes. A model that is loading or
# cannot be loaded is no reason to restart the process.
LIVE = "grpc.health.v1.Health"
_THREADS = 64  # for first messages, and as many for updates: each send to a client that does not read occupies one

Send = Callable[[health_pb2.HealthCheckResponse | None], None]


class _Watcher:
    """An open Watch. ``send`` sends a message, or ends the stream with None. One thread at a time uses it."""

    __slots__ = ("busy", "last_sent", "send", "service")

    def __init__(self, service: str, send: Send) -> None:
        self.service = service
        self.send = send
        self.busy = False  # it waits for a thread, or a thread is sending to it
        self.last_sent: int | None = None


class HealthServicer:
    """Answers Check at once, and sends changes to watchers on other threads: a client that does not read blocks a send.

    A watcher's first message has other threads than updates, which do not wait behind clients that have never read.
    """

    def __init__(self, registry: Registry, service: str, threads: int = _THREADS) -> None:
        self._registry = registry
        self._service = service
        self._first = ThreadPoolExecutor(threads, "health-first")
        self._updates = ThreadPoolExecutor(threads, "health-update")
        self._lock = threading.Lock()  # guards the set of watchers and their fields
        self._watchers: set[_Watcher] = set()
        self._computing = threading.Lock()  # guards what follows: a newer status must not be overwritten by an older
        self._closed = False
        self._current = self._statuses()
        registry.subscribe(self._on_change)

    def check(self, request: health_pb2.HealthCheckRequest, call: object) -> health_pb2.HealthCheckResponse:
        status = self._current.get(request.service)
        if status is None:
            raise NotFound(f"unknown service {quoted(request.service)}; for a model, give its name")
        return health_pb2.HealthCheckResponse(status=status)

    def watch(self, request: health_pb2.HealthCheckRequest, call: CallContext, send: Send) -> None:
        """Send the status now and at each change, until the client leaves or the server stops."""
        watcher = _Watcher(request.service, send)
        with self._lock:
            self._watchers.add(watcher)
        call.cancellation.subscribe(lambda: self._forget(watcher))
        self._notify(watcher)

    def shut_down(self, timeout: float) -> None:
        """Report everything but the process as NOT_SERVING, and end the watches.

        Waits at most ``timeout`` seconds for clients that do not read.
        """
        self._closed = True
        self._on_change()
        until = time.monotonic() + timeout
        while self._watchers and time.monotonic() < until:
            time.sleep(0.005)
        for threads in (self._first, self._updates):
            threads.shutdown(wait=not self._watchers, cancel_futures=True)

    def _on_change(self) -> None:
        with self._computing:
            self._current = self._statuses()
        with self._lock:
            watchers = tuple(self._watchers)
        for watcher in watchers:
            self._notify(watcher)

    def _forget(self, watcher: _Watcher) -> None:
        with self._lock:
            self._watchers.discard(watcher)

    def _notify(self, watcher: _Watcher) -> None:
        """Have a thread send the status to ``watcher``, unless one is about to."""
        with self._lock:
            if watcher.busy or watcher not in self._watchers:
                return
            watcher.busy = True
            threads = self._first if watcher.last_sent is None else self._updates
        try:
            threads.submit(self._send_changes, watcher)
        except RuntimeError:  # the server has stopped, or the system can start no thread
            self._end(watcher)  # an open stream would delay the drain

    def _end(self, watcher: _Watcher) -> None:
        """End a watch, once: two threads may be about to."""
        with self._lock:
            if watcher not in self._watchers:
                return
            self._watchers.discard(watcher)
        watcher.send(None)

    def _send_changes(self, watcher: _Watcher) -> None:
        try:
            while True:
                with self._lock:  # a change is seen either here, or by the thread that its notification starts
                    status = self._current.get(watcher.service, _SERVICE_UNKNOWN)
                    if status == watcher.last_sent or watcher not in self._watchers:
                        watcher.busy = False
                        break
                    watcher.last_sent = status
                watcher.send(health_pb2.HealthCheckResponse(status=status))
            if self._closed:
                self._end(watcher)
        except Exception:  # noqa: BLE001 -- nobody looks at what a thread of a pool raises
            _log.exception("cannot send a health update for %r", watcher.service[:200])
            self._forget(watcher)

    def _statuses(self) -> dict[str, int]:
        server = _SERVING if self._registry.ready and not self._closed else _NOT_SERVING
        names = {model.name for model in self._registry.models()}
        ready = {name for name in names if not self._closed and self._registry.is_ready(name, "")}
        models = {name: _SERVING if name in ready else _NOT_SERVING for name in names}
        return {**models, "": server, self._service: server, LIVE: _SERVING}
