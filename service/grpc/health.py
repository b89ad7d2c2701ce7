"""grpc.health.v1: the server as ``""`` and as the inference service, every model under its name, and the process.

The messages are grpcio-health-checking's, but its servicer is not used. It sends to watchers while it holds a lock that
a leaving watcher needs on gRPC's own thread, which blocks the whole server (grpc/grpc#43403).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait

from grpc_health.v1 import health_pb2

from bf16kit.messages.errors import NotFound
from bf16kit.messages.wording import quoted
from service.contract import Registry
from service.grpc.senders import Senders
from service.request import Cancellation

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
_log = logging.getLogger(__name__)
# The health service itself is SERVING as long as the process answers: for liveness probes. A model that is loading or
# cannot be loaded is no reason to restart the process.
LIVE = "grpc.health.v1.Health"
_SENDERS = 64  # threads: a send to a watcher that does not read occupies one until the watchdog ends the call

Send = Callable[[health_pb2.HealthCheckResponse | None], None]


class _Watcher:
    """An open Watch. ``send`` sends a message, or ends the stream with None. One thread at a time uses it."""

    __slots__ = ("_ended", "_last_sent", "_lock", "_sending", "client", "has_read", "send", "service")

    def __init__(self, service: str, client: str, send: Send) -> None:
        self.service = service
        self.client = client
        self.has_read = False  # the client has read a message
        self.send = send
        self._lock = threading.Lock()
        self._sending = self._ended = False
        self._last_sent: int | None = None

    def start_sending(self) -> bool:
        """Return whether the caller is to send the status.

        False if another thread is sending, which will see this change too.
        """
        with self._lock:
            if self._sending or self._ended:
                return False
            self._sending = True
            return True

    def next_status(self, current: Callable[[], int]) -> int | None:
        """Return the status to send; None if the client already has it, and this thread is done."""
        with self._lock:
            status = current()  # under the lock: a change is seen either here or by the next thread that starts
            if self._last_sent == status:
                self._sending = False
                return None
            self._last_sent = status
            return status

    def end(self) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = True
        self.send(None)


class HealthServicer:
    """Answers Check at once, and sends status changes to watchers on separate threads.

    The registry's callback must not block, but a send blocks while a client does not read.
    """

    def __init__(self, registry: Registry, service: str) -> None:
        self._registry = registry
        self._service = service
        self._senders = Senders(_SENDERS, "health")
        self._watchers: set[_Watcher] = set()
        self._closed = False
        self._lock = threading.Lock()
        self._current = self._statuses()
        registry.subscribe(self._on_change)

    @property
    def has_backlog(self) -> bool:
        """Whether status changes wait for threads that are sending to slow watchers. These then get less time."""
        return self._senders.has_backlog

    def check(self, request: health_pb2.HealthCheckRequest, call: object) -> health_pb2.HealthCheckResponse:
        status = self._current.get(request.service)
        if status is None:
            raise NotFound(f"unknown service {quoted(request.service)}; for a model, give its name")
        return _response(status)

    def watch(
        self, request: health_pb2.HealthCheckRequest, client: str, cancellation: Cancellation, send: Send
    ) -> None:
        """Send the status now and at each change, until the client leaves or the server stops."""
        watcher = _Watcher(request.service, client, send)
        self._watchers.add(watcher)
        cancellation.subscribe(lambda: self._watchers.discard(watcher))
        self._notify(watcher)

    def shut_down(self, timeout: float) -> None:
        """Report everything but the process as NOT_SERVING, for good, and end the watches, for which a stop would wait.

        Waits at most ``timeout`` seconds for clients that do not read.
        """
        with self._lock:
            self._closed = True
            self._current = self._statuses()
        sends = [task for watcher in tuple(self._watchers) if (task := self._notify(watcher)) is not None]
        _, unfinished = wait(sends, timeout=timeout)
        self._senders.shutdown(wait=not unfinished)

    def _on_change(self) -> None:
        with self._lock:
            self._current = self._statuses()
        for watcher in tuple(self._watchers):
            self._notify(watcher)

    def _notify(self, watcher: _Watcher) -> Future[None] | None:
        """Have a thread send the status to ``watcher``. Return None if there is nothing to wait for."""
        if not watcher.start_sending():
            return None
        try:
            return self._senders.submit(watcher.client, lambda: self._send(watcher), reads=watcher.has_read)
        except RuntimeError:  # shut down meanwhile: an open stream would delay the drain
            watcher.end()
            return None

    def _send(self, watcher: _Watcher) -> None:
        try:
            self._send_changes(watcher)
        except Exception:  # noqa: BLE001 -- nobody looks at what a thread of a pool raises
            _log.exception("a health watcher cannot be told of %r", watcher.service[:200])
            self._watchers.discard(watcher)

    def _send_changes(self, watcher: _Watcher) -> None:
        while (status := watcher.next_status(lambda: self._current.get(watcher.service, _SERVICE_UNKNOWN))) is not None:
            watcher.send(_response(status))
            watcher.has_read = True
        if self._closed:
            watcher.end()

    def _statuses(self) -> dict[str, int]:
        server = _SERVING if self._registry.ready and not self._closed else _NOT_SERVING
        names = {model.name for model in self._registry.models()}
        ready = {name for name in names if not self._closed and self._registry.is_ready(name, "")}
        models = {name: _SERVING if name in ready else _NOT_SERVING for name in names}
        return {**models, "": server, self._service: server, LIVE: _SERVING}


def _response(status: int) -> health_pb2.HealthCheckResponse:
    return health_pb2.HealthCheckResponse(status=status)
