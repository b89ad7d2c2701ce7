"""grpc.health.v1: the server as ``""`` and as the inference service, and every model under its name.

The messages are grpcio-health-checking's, its servicer is not: it sends to watchers while it holds the lock that a
watcher who leaves needs on gRPC's own thread, and then the whole server stands still (grpc/grpc#43403).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service.contract import Registry
from service.transport.handlers import SERVICE

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
_LAST_WORDS_S = 1.0  # how long a stopping server waits for watchers to have been told


@dataclass(eq=False, slots=True)
class _Watcher:
    """An open Watch: ``send`` sends a message, or with None ends the stream. Used on the health thread alone."""

    service: str
    send: Callable[[health_pb2.HealthCheckResponse | None], None]
    told: int | None = None


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Keeps watchers in step with the registry on one thread, which holds no lock while it sends.

    The registry's callback must not block, and sending does where a connection is slow.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._thread = ThreadPoolExecutor(1, "health")
        self._watchers: set[_Watcher] = set()
        self._closed = self._ended = False
        self._now = self._statuses()
        registry.subscribe(self._changed)

    def Check(  # noqa: N802 -- the RPC's name
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        status = self._now.get(request.service)
        if status is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service {request.service!r}; models go by their names")
        return _response(status)

    def Watch(  # noqa: N802 -- the RPC's name
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext, send_response_callback: Any = None
    ) -> None:
        watcher = _Watcher(request.service, send_response_callback)
        self._watchers.add(watcher)
        if not context.add_callback(lambda: self._watchers.discard(watcher)):
            self._watchers.discard(watcher)
        if not self._on_thread(lambda: self._tell(watcher)):
            watcher.send(None)  # shut down: a stream left open would hold up the drain

    # gRPC then calls it with a callback and gives its thread back, where a watcher would otherwise hold one for good
    Watch.experimental_non_blocking = True  # type: ignore[attr-defined]

    def shut_down(self) -> None:
        """Tell everyone NOT_SERVING, for good, and end their streams: a server that stops waits for every open one."""
        if not self._closed:
            self._closed = True
            wait([self._thread.submit(self._end)], timeout=_LAST_WORDS_S)
        self._thread.shutdown(wait=False)

    def _on_thread(self, task: Callable[[], None]) -> bool:
        """False when the thread has been shut down."""
        try:
            self._thread.submit(task)
        except RuntimeError:
            return False
        return True

    def _changed(self) -> None:
        self._on_thread(self._publish)

    def _publish(self) -> None:
        self._now = self._statuses()
        for watcher in tuple(self._watchers):
            self._tell(watcher)

    def _tell(self, watcher: _Watcher) -> None:
        """Send the status of the service that is watched, if it is news."""
        status = self._now.get(watcher.service, _SERVICE_UNKNOWN)
        if watcher.told != status:
            watcher.told = status
            watcher.send(_response(status))
        if self._ended:  # who came too late
            watcher.send(None)

    def _end(self) -> None:
        self._publish()
        for watcher in tuple(self._watchers):
            watcher.send(None)
        self._ended = True

    def _statuses(self) -> dict[str, int]:
        server = _SERVING if self._registry.ready and not self._closed else _NOT_SERVING
        names = {model.name for model in self._registry.models()}
        ready = {name for name in names if not self._closed and self._registry.is_ready(name, "")}
        models = {name: _SERVING if name in ready else _NOT_SERVING for name in names}
        return {**models, "": server, SERVICE: server}


def _response(status: int) -> health_pb2.HealthCheckResponse:
    return health_pb2.HealthCheckResponse(status=status)
