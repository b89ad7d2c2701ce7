"""The front: answers requests for all models together or for none, and receives the replicas' reports.

It runs no model. Behind Ray's HTTP proxy it serves a server's pages, and ``/targets``, where Prometheus discovers
replicas.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Mapping
from typing import Any

from grpc import StatusCode
from starlette.requests import Request
from starlette.responses import Response

from deploy.ray.answering import RpcMethods
from deploy.ray.calls import Rpc
from deploy.ray.frames import Frame
from deploy.ray.registry import FrontModels, FrontRegistry
from deploy.ray.reports import ModelVersions, Report, Reports
from service.config.credentials import Credentials
from service.config.logs import configure
from service.config.periodic import PeriodicThread
from service.config.serverconfig import ServerConfig
from service.grpc.status import Status
from service.http.pages import Routes, routes
from service.http.views import StatusReader
from service.operations import Operations
from service.server import build_direct_transport
from service.telemetry.history import NAMES, TICK_SECONDS, History
from service.telemetry.metrics import Metrics

_log = logging.getLogger(__name__)
_MAINTAIN_SECONDS = 1.0
_NOT_HERE = Status(
    StatusCode.UNIMPLEMENTED,
    "models are not loaded and unloaded over the network here: add them to the repository, or remove them from it",
)
_CHANGES = ("RepositoryModelLoad", "RepositoryModelUnload")


class Front(RpcMethods):
    """The only front. ``models``: those to serve, versions by name; :meth:`set_models` replaces them."""

    def __init__(self, config: Mapping[str, Any], models: ModelVersions) -> None:
        self._config = ServerConfig(**{**config, "model_control": "none"})
        configure(self._config.log_level, self._config.log_format)
        metrics, self._reports = Metrics(), Reports()
        self._reports.set_models(models)
        registry = FrontRegistry(self._reports)
        self._credentials = Credentials.of(self._config)
        operations = Operations(models=FrontModels(registry, self._reports))
        self.direct = build_direct_transport(self._config, registry, metrics.refused, self._credentials, operations)
        history = History(lambda: metrics.samples(NAMES))
        self._pages: Routes = routes(registry, metrics, StatusReader(registry, history).snapshot)
        self._tickings = [
            PeriodicThread("history", TICK_SECONDS, history.tick),
            PeriodicThread("reports", _MAINTAIN_SECONDS, self._reports.maintain),
        ]
        for ticking in self._tickings:
            ticking.start()
        self._stopped = threading.Event()

    async def set_models(self, models: ModelVersions) -> None:
        """Set the models to serve from now on."""
        self._reports.set_models(models)

    async def retire(self) -> None:
        """Be not ready from now on; requests that still arrive are answered."""
        self._reports.retire()

    async def respond_unary(self, rpc: Rpc, data: bytes, context: Any) -> Frame:
        return Frame.of(_NOT_HERE) if rpc.method in _CHANGES else await super().respond_unary(rpc, data, context)

    async def report(self, fields: Mapping[str, Any]) -> float:
        """Take a replica's report; reply when the next is due, with the longest time that its reply may take."""
        report = Report.from_json(fields)
        if fields.get("gone"):
            self._reports.forget(report.replica, report)
            return 0.0
        return await self._reports.receive(report)

    async def targets(self) -> list[str]:
        """Return the addresses at which replicas are scraped, ``host:port``."""
        return sorted(report.target for report in self._reports.reports() if report.target)

    async def __call__(self, request: Request) -> Response:
        """Answer a request for a page, as a server's HTTP port does."""
        path = request.url.path
        route = self._pages.get(path)
        if not (route is not None and route.probe) and not self._may_read(request.headers.get("authorization")):
            return Response("a token with the scope read is needed\n", 401, {"WWW-Authenticate": "Bearer"})
        if path == "/targets":
            targets = [{"targets": await self.targets(), "labels": {"job": "bf16kit"}}]
            return Response(json.dumps(targets), media_type="application/json")
        if route is None or request.method not in ("GET", "HEAD"):
            return Response("not found\n", 404)
        argument = request.url.query if route.takes_query else request.headers.get("accept", "")
        try:
            page = await asyncio.get_running_loop().run_in_executor(None, route.make, argument)
        except Exception:  # noqa: BLE001 -- of what this says nothing, Ray would tell the client
            _log.exception("the page %s cannot be made", path)
            return Response("internal error; the log of the front has the details\n", 500)
        return Response(page.body, int(page.status), dict(page.headers), page.content_type)

    def __del__(self) -> None:
        if getattr(self, "_stopped", None) is not None and not self._stopped.is_set():
            self._stopped.set()
            for ticking in self._tickings:
                ticking.stop()
            self.direct.stop(0)

    def _may_read(self, authorization: str | None) -> bool:
        tokens = self._credentials.tokens
        return tokens is None or "read" in (tokens.scopes(authorization or "") or ())
