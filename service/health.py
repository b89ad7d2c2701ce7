"""grpc.health.v1: the server as ``""`` and as the inference service, and every model under its name."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from service.contract import Registry
from service.handlers import SERVICE

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class _Servicer(health.HealthServicer):
    """Remembers its watchers, to end their streams: a server that stops waits for every open one."""

    def __init__(self) -> None:
        super().__init__(experimental_non_blocking=True)
        self._watchers: set[Callable[[object], None]] = set()

    def Watch(self, request: Any, context: grpc.ServicerContext, send_response_callback: Any = None) -> Any:  # noqa: N802 -- the RPC
        if context.add_callback(lambda: self._watchers.discard(send_response_callback)):
            self._watchers.add(send_response_callback)
        return super().Watch(request, context, send_response_callback)

    def end_watches(self) -> None:
        """Complete the stream of everyone who watches, after the last status they were sent."""
        for send in tuple(self._watchers):
            send(None)


class HealthReporter:
    """Keeps the health service in step with the registry, on a thread of its own.

    The registry's callback must not block, and telling a watcher does when its connection is slow.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._servicer = _Servicer()
        self._thread = ThreadPoolExecutor(1, "health")
        self._told: dict[str, int] = {}
        self._closed = False
        self._publish()
        registry.subscribe(self._changed)

    def register(self, server: grpc.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    def shut_down(self) -> None:
        """Tell everyone NOT_SERVING, for good, and end their watches."""
        self._closed = True
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._servicer.enter_graceful_shutdown()
        self._servicer.end_watches()

    def _changed(self) -> None:
        if self._closed:
            return
        try:
            self._thread.submit(self._publish)
        except RuntimeError:  # shut down since the line above: nobody is left to be told
            return

    def _publish(self) -> None:
        """Tell what is new: repeating an unchanged status would wake every watcher."""
        now = self._statuses()
        for service in self._told.keys() - now.keys():
            now[service] = _SERVICE_UNKNOWN
        for service, status in now.items():
            if self._told.get(service) != status:
                self._servicer.set(service, status)
        self._told = now

    def _statuses(self) -> dict[str, int]:
        server = _SERVING if self._registry.ready else _NOT_SERVING
        names = {model.name for model in self._registry.models()}
        ready = {name: _SERVING if self._registry.is_ready(name, "") else _NOT_SERVING for name in names}
        return {**ready, "": server, SERVICE: server}
