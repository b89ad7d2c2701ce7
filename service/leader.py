"""The process that leads a server: the only one, or the supervisor of several workers. It knows nothing of gRPC.

It decides which models are desired and which precision answers, leads the shadow, adds up what all processes count, and
serves the HTTP port.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from typing import Protocol

from bf16kit.service.config.certificates import Credentials
from bf16kit.service.config.loops import Ending, Guard, PeriodicThread
from bf16kit.service.config.serverconfig import LOOPBACK, ServerConfig
from bf16kit.service.contract import Overview
from bf16kit.service.drift.fallbackcontroller import FallbackController, ServingProcesses
from bf16kit.service.http.httpserver import HttpServer, Limits
from bf16kit.service.http.pages import Access, StatusReader, evidence_route, routes
from bf16kit.service.models.controller import Controller
from bf16kit.service.models.plan import DesiredModel
from bf16kit.service.peers.channel import Body
from bf16kit.service.regions import RegionTable
from bf16kit.service.shadow.process import NAME as SHADOW
from bf16kit.service.shadow.process import FindPlan, ShadowProcess
from bf16kit.service.telemetry.metrics import Counting, Metrics

_log = logging.getLogger(__name__)
# Of the HTTP port, if clients infer there. Most proxies close a connection that is idle for 60 s: if this server did so
# first, a request that is on its way would be lost.
_REST = Limits(connections=2048, idle_seconds=75.0)
MAINTAIN_SECONDS = 0.1  # between two calls of :meth:`Leader.maintain`


class ServedModels(ServingProcesses, Protocol):
    """The models in the processes that serve: in this one, or in all workers."""

    def apply(self, desired: DesiredModel) -> Future[None]:
        """Serve a model as desired. The future ends when all processes do, or fails with the reason."""

    def apply_all(self, desired_models: Iterable[DesiredModel]) -> Mapping[str, Future[None]]:
        """Serve these models from the start. Returns a future for each, by name."""


class Leader:
    """Leads a server whose models are ``models``, and whose state ``overview`` tells.

    The constructor binds the HTTP port and starts nothing. Call :meth:`start`, then :meth:`maintain` every
    :data:`MAINTAIN_SECONDS`, then :meth:`drain`; in any case :meth:`close`.

    ``metrics`` are this process' own, ``ask_counts`` asks the workers for theirs. ``find_plan``: several processes
    choose samples, by the plans that this returns. ``fixed``: the models never change, the repository is not read.
    """

    def __init__(
        self,
        config: ServerConfig,
        metrics: Metrics,
        overview: Overview,
        models: ServedModels,
        *,
        ask_counts: Callable[[], dict[str, Future[Body]]] = dict,
        find_plan: FindPlan | None = None,
        fixed: bool = False,
    ) -> None:
        self.config = config
        self.credentials = Credentials.of(config)
        self._ask_workers = ask_counts
        self.counting = Counting(
            metrics, self._ask_counts, lambda: [(slot.name, slot.version) for slot in overview.models()]
        )
        self.shadow = ShadowProcess(
            config,
            lambda message: self.counting.receive(SHADOW, message.body),
            lambda: self.counting.process_died(SHADOW),
            lambda verdict: self.fallback.receive(verdict),
            on_forget=self.counting.forget,
            find_plan=find_plan,
        )
        self.fallback = FallbackController(models, self.shadow.restart)
        self.controller: Controller | None = None
        self._poll: PeriodicThread | None = None
        if not fixed:
            self.controller = Controller(
                config.repository,
                models.apply,
                models.apply_all,
                config.model_control,
                config.load_model,
                overview.models,
            )
            self.controller.apply_initial()
            if config.model_control == "poll":
                self._poll = PeriodicThread("repository-poll", config.poll_seconds, self.controller.poll)
        off_reason = self.shadow.off_reason
        self._status = StatusReader(overview, self.counting.samples, workers=config.workers, off_reason=off_reason)
        evidence = evidence_route(overview, self.shadow.evidence if config.evidence else None)
        pages = routes(overview, self.counting.expose, self._status.snapshot, evidence)
        self.http = HttpServer(
            config.host,
            config.http_port,
            pages,
            limits=_REST if config.http_inference else None,
            access=Access(self.credentials.tokens, config.tls_client_ca is not None, config.host),
            certificates=self.credentials.certificates,
            on_refused=metrics.refused,
        )
        self._guard = Guard()

    def start(self, grpc_port: int) -> None:
        """Serve HTTP, and follow the repository if it is polled."""
        self._status.listening(grpc_port, self.http.port)
        self.http.start()
        if self._poll is not None:
            self._poll.start()

    def maintain(self) -> None:
        """Do the periodic work of shadow process and fallback, always on the same thread. Errors are logged."""
        self._guard.run("the shadow's maintenance", self.shadow.maintain)
        self._guard.run("the fallback's maintenance", self.fallback.maintain)

    def stop(self) -> None:
        """Start no further changes."""
        if self._poll is not None:
            self._poll.stop(wait=False)  # reading a network file system may never end

    def drain(
        self,
        retire: Callable[[], object],
        finish: Callable[[float], Ending],
        tend: Callable[[], object] = lambda: None,
    ) -> Ending:
        """Report not ready (``retire``), then reject new requests and wait for those in flight (``finish``).

        ``finish`` is given the seconds that this may take. While the lame duck still serves, ``tend`` is called at
        intervals. HTTP is served until :meth:`close`.
        """
        self.stop()
        config = self.config
        if config.lame_duck_seconds:
            _log.info("stopping: not ready, but still serving for another %g s", config.lame_duck_seconds)
            retire()
            until = time.monotonic() + config.lame_duck_seconds
            while (left := until - time.monotonic()) > 0:  # a second signal ends the process at once
                time.sleep(min(MAINTAIN_SECONDS, left))
                tend()
        started = time.monotonic()
        _log.info("draining for up to %g s", config.drain_seconds)
        ending = finish(config.drain_seconds)
        if not ending.completed:
            _log.warning("requests were cut off: still in flight after %g s", config.drain_seconds)
        _log.info("stopped after %.2f s", time.monotonic() - started)
        return ending

    def close(self) -> None:
        """End the shadow, whose unfinished measurements are lost, and the HTTP port."""
        self.stop()
        self.shadow.close()
        self.http.close()

    def forget(self, model: str, versions: Collection[int]) -> None:
        """Forget what was counted of versions that all processes have reloaded or unloaded."""
        self.counting.forget(model, versions)
        self.shadow.forget(model)

    def _ask_counts(self) -> dict[str, Future[Body]]:
        pending = self._ask_workers()
        if (counts := self.shadow.ask_counts()) is not None:
            pending[SHADOW] = counts
        return pending


def announce(config: ServerConfig, grpc_port: int, http_port: int) -> None:
    """Log the addresses of the server, with a warning if it takes tokens without TLS from other machines."""
    _log.info(
        "gRPC on %s port %d; metrics and status page on %s://%s:%d/",
        config.host,
        grpc_port,
        "https" if config.tls_certificate else "http",
        config.host,
        http_port,
    )
    if config.token_file and not config.tls_certificate and config.host not in LOOPBACK:
        _log.warning("tokens pass over the network unencrypted: give tls_certificate and tls_key, or put TLS in front")


def open_regions(config: ServerConfig) -> RegionTable | None:
    """Return the table of regions; None: shared memory is off."""
    if not config.shared_memory:
        return None
    if prefix := config.region_prefix:
        _log.info("shared memory is on: clients may register files of /dev/shm whose names begin with %r", prefix)
    else:
        _log.warning(
            "shared_memory is *: clients may register every file of /dev/shm that this user may read and write"
        )
    return new_table(config)


def new_table(config: ServerConfig) -> RegionTable:
    """Return a table with the configured limits: for another process of a server that has shared memory on."""
    return RegionTable(config.region_prefix)
