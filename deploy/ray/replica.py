"""A replica: one model, served as by a `bf16-serve` process, with Ray's proxy in place of its gRPC port."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import ray
from bf16kit.system import controlgroup
from deploy.ray.answering import RpcMethods
from deploy.ray.calls import FRONT
from ray import serve
from service.config.heap import bound_heap
from service.config.logs import configure
from service.config.serverconfig import LOOPBACK, ServerConfig
from service.models.plan import DesiredModel
from service.operations import RegistryModels, VersionStatistics
from service.peers.channel import to_json
from service.server import ModelServer, build_direct_transport
from service.workers.state import SlotState

_log = logging.getLogger(__name__)
_MAINTAIN_SECONDS = 0.1
_CHECK_SECONDS = 0.05
_REPORT_SECONDS = 5.0  # for one report, beside the time that the front may hold its reply; the next repeats everything
_ENDING_SECONDS = 0.25  # after which a replica that ends waits for no reply to an earlier report
_FINAL_REPORT_SECONDS = _REPORT_SECONDS + 1.0
_RETRY_SECONDS = 1.0


class Replica(RpcMethods):
    """``desired`` is what to serve, as JSON: a replica that is started later serves the same as the others.

    Ray sends it requests once the constructor returns. By then the model has passed every gate, including its golden
    samples. Otherwise it raises RuntimeError with the reason, and Ray tries again.
    """

    def __init__(self, config: Mapping[str, Any], desired: str) -> None:
        bound_heap()
        # No lame duck here: whoever removes it has told load balancers before, so no request arrives by the time Ray
        # stops it.
        self._config = ServerConfig(**{**config, "http_port": 0, "model_control": "none", "lame_duck_seconds": 0})
        configure(self._config.log_level, self._config.log_format)
        _log_memory(self._config)
        self._name = uuid.uuid4().hex[:12]
        self._ended = threading.Event()
        self._served = served = ModelServer(self._config, [DesiredModel.from_json(desired)])
        self.direct = build_direct_transport(
            self._config,
            served.repository,
            served.metrics.refused,
            served.credentials,
            served.operations,
            served.tracing,
        )
        served.start(0)
        self._threads = [
            threading.Thread(target=self._maintain, name="maintain", daemon=True),
            threading.Thread(target=self._report, name="report", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        self._wait_until_loaded()

    def _wait_until_loaded(self) -> None:
        slots = self._served.repository.models
        while any(slot.state == "loading" for slot in slots()):
            self._ended.wait(_CHECK_SECONDS)
        if any(slot.state == "ready" for slot in slots()):
            return
        reasons = "; ".join(f"version {slot.version}: {slot.reason}" for slot in slots()) or "it has no version"
        self._end()
        raise RuntimeError(f"the model cannot be served: {reasons}")

    def check_health(self) -> None:
        """Raise RuntimeError if no version is ready.

        Ray calls this periodically, and replaces a replica that raises.
        """
        if not any(slot.state == "ready" for slot in self._served.repository.models()):
            raise RuntimeError("no version of the model is ready now")

    async def __call__(self, request: Request) -> Response:
        """Respond 404 to Ray's HTTP proxy: a model's pages are on its replicas' own ports."""
        return Response("models answer gRPC; /targets has the addresses of their metrics\n", 404)

    def __del__(self) -> None:
        """Stop. Ray calls this when no request is active any more, or the time for that is over."""
        with contextlib.suppress(AttributeError):  # the constructor did not finish
            if not self._ended.is_set():
                self._end()

    def _end(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(_FINAL_REPORT_SECONDS)
        self._served.drain(self.direct)
        self._served.close()

    # --- on threads of its own ----------------------------------------------------------------------------------------

    def _maintain(self) -> None:
        while not self._ended.wait(_MAINTAIN_SECONDS):
            self._served.maintain()

    def _report(self) -> None:
        held: float | None = 0.0
        while not self._ended.wait(_RETRY_SECONDS if held is None else 0.0):
            held = self._send(self._made_report(), held or 0.0)
        # Here, not in _end(): that may run on Ray's event loop, where waiting for a response is impossible.
        self._send({**self._made_report(), "gone": True}, 0.0, last=True)

    def _made_report(self) -> dict[str, Any]:
        repository = self._served.repository
        statistics = tuple(RegistryModels(repository).statistics("", ""))
        return {
            "replica": self._name,
            "target": self._target(),
            "slots": [to_json(SlotState.of(slot)) for slot in repository.models()],
            "statistics": to_json(statistics, tuple[VersionStatistics, ...]),
        }

    def _send(self, report: Mapping[str, Any], held: float, *, last: bool = False) -> float | None:
        """Send a report. Return when the next one is due, with the seconds for which the front may hold its reply.

        ``held`` are those of this one. Returns None if the front does not respond, or if this replica ends meanwhile; a
        later report repeats everything.
        """
        try:
            response = serve.get_app_handle(FRONT).report.remote(dict(report))
            deadline = time.monotonic() + _REPORT_SECONDS + held
            while last or not self._ended.is_set():
                with contextlib.suppress(TimeoutError):
                    return float(response.result(timeout_s=_ENDING_SECONDS))
                if time.monotonic() > deadline:
                    raise TimeoutError
        except Exception as error:  # noqa: BLE001 -- Ray's, of many kinds; this thread must live on
            if not self._ended.is_set():
                _log.info("this replica could not report to the front: %s", type(error).__name__)
        return None

    def _target(self) -> str:
        host = self._config.host
        if host not in LOOPBACK:
            host = str(ray.util.get_node_ip_address())
        return f"{host}:{self._served.http.port}"


def _log_memory(config: ServerConfig) -> None:
    """Log the replica's memory reservation and limits, and warn if its node has less."""
    reserved = int(ray.get_runtime_context().get_assigned_resources().get("memory", 0))
    _log.info(
        "memory: %.0f MB of the node are reserved for this replica; requests may use %d bytes of it,"
        " one message at most %d",
        reserved / 1e6,
        config.max_request_bytes,
        config.max_message_bytes,
    )
    room = controlgroup.memory()
    if room is not None and room.left < reserved:
        _log.warning(
            "%s, less than the %.0f MB that are reserved for this replica: something else takes memory there, or Ray"
            " was told of more than the node has (`ray start --memory`)",
            room,
            reserved / 1e6,
        )
