"""Everything that one process serves: its models, their metrics and drift, and the HTTP port, but not the gRPC port."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial

from service.config.certificates import Credentials
from service.config.logsettings import LogSettings
from service.config.periodic import Guard, PeriodicThread
from service.config.resources import HeapTrimmer
from service.config.serverconfig import ServerConfig
from service.config.stop import Ending
from service.drift.fallbackcontroller import FallbackController
from service.grpcport import RequestSource, drain, extensions, open_tracing, read_only_unless_enabled
from service.http.pages import evidence_route, routes
from service.http.statusreader import StatusReader
from service.httpport import open_http
from service.models.controller import Controller
from service.models.plan import DesiredModel
from service.models.repository import Repository, RepositoryListing
from service.operations import Operations, RegistryModels
from service.shadow.combinedmetrics import CombinedMetrics
from service.shadow.process import ShadowProcess
from service.shadow.samples import PlanSampleSender
from service.sharedmemory import open_regions
from service.telemetry.metrics import Metrics

_log = logging.getLogger(__name__)
_LAST_TRACES_SECONDS = 3.0  # the longest that a stop waits to export the last traces


class ModelServer:
    """The models, metrics and HTTP port of one process. The constructor binds the HTTP port and starts nothing.

    Call :meth:`start`, then :meth:`maintain` about ten times a second, then :meth:`drain`; in any case :meth:`close`.
    ``desired_models``: serve exactly these; the repository is not read, and clients cannot load models.
    """

    def __init__(self, config: ServerConfig, desired_models: Iterable[DesiredModel] | None = None) -> None:
        self.config = config
        self.metrics = Metrics()
        self._counting = CombinedMetrics(
            self.metrics,
            lambda: self._shadow.ask_counts(),
            lambda: [(slot.name, slot.version) for slot in self.repository.models()],
        )
        self._shadow = ShadowProcess(
            config,
            self._counting.receive,
            self._counting.process_died,
            lambda verdict: self._owner.receive(verdict),
            on_forget=self._counting.forget,
        )
        self.repository = Repository(
            self.metrics,
            device=config.device,
            threads=config.threads,
            ready_when_empty=config.model_control == "explicit",
            new_sender=lambda name, plan: PlanSampleSender(
                name, plan, partial(self._shadow.ask, plan), self._shadow.forget
            ),
            on_verdict=lambda verdict: self._owner.receive(verdict),
        )
        self._owner = FallbackController(self.repository, self._shadow.restart)
        self._controller, self._poll = None, None
        if desired_models is None:
            self._controller = Controller(
                config.repository,
                self.repository.apply,
                self.repository.apply_all,
                config.model_control,
                config.load_model,
                self.repository.models,
            )
            self._controller.apply_initial()
            if config.model_control == "poll":
                self._poll = PeriodicThread("repository-poll", config.poll_seconds, self._controller.poll)
        else:
            self.repository.apply_all(desired_models)
        self.credentials = Credentials.of(config)
        self._traces, self.tracing = open_tracing(config, self.repository, self.metrics.traced)
        self.operations = self._operations()
        self._status = StatusReader(self.repository, self._counting.samples, off_reason=self._shadow.off_reason)
        evidence = evidence_route(self.repository, self._shadow.evidence if config.evidence else None)
        pages = routes(self.repository, self._counting, self._status.snapshot, evidence)
        self.http = open_http(config, pages, self.metrics, self.credentials)
        self._guard = Guard()
        self._heap = HeapTrimmer()

    def start(self, grpc_port: int, listening: Callable[[], object] = lambda: None) -> None:
        """Serve HTTP, call ``listening``, then load the models in the background."""
        self._status.listening(grpc_port, self.http.port)
        self.http.start()
        listening()
        for model in self.repository.models():
            _log.info("%s: %s", model.label, model.state)
        self.repository.start()
        if self._poll is not None:
            self._poll.start()
        if self.tracing is not None:
            self.tracing.start()
        self._heap.start()

    def maintain(self) -> None:
        """Do the periodic work of shadow process and fallback. Call it about ten times a second, on one thread.

        An error in it is logged, and does not end the caller's loop.
        """
        self._guard.run("the shadow's maintenance", self._shadow.maintain)
        self._guard.run("the fallback's maintenance", self._owner.maintain)

    def drain(self, source: RequestSource) -> Ending:
        """Report not ready, then reject new requests, then wait for those in flight. HTTP is served until the end."""
        self._heap.stop()
        if self._poll is not None:
            self._poll.stop(wait=False)  # reading a network file system may never end
        config = self.config
        if config.lame_duck_seconds:
            _log.info("stopping: not ready, but still serving for another %g s", config.lame_duck_seconds)
            self.repository.retire()
            time.sleep(config.lame_duck_seconds)  # a second signal ends the process at once
        started = time.monotonic()
        _log.info("draining for up to %g s", config.drain_seconds)
        ending = drain(self.repository, source, config.drain_seconds)
        if self.tracing is not None:
            remaining = started + config.drain_seconds - time.monotonic()
            self.tracing.close(min(_LAST_TRACES_SECONDS, max(1.0, remaining)))
        self.http.close()
        if not ending.completed:
            _log.warning("requests were cut off: still in flight after %g s", config.drain_seconds)
        _log.info("stopped after %.2f s", time.monotonic() - started)
        return ending

    def close(self) -> None:
        """End the process that runs the fp32 references; its unfinished measurements are lost."""
        self._shadow.close()

    def _operations(self) -> Operations:
        config, controller = self.config, self._controller
        explicit = controller is not None and config.model_control == "explicit"
        logs = LogSettings(config.log_level, config.log_format)
        return Operations(
            models=RegistryModels(self.repository)
            if controller is None
            else RepositoryListing(self.repository, controller),
            control=controller if explicit else None,
            regions=open_regions(config),
            logs=read_only_unless_enabled(config, logs),
            traces=read_only_unless_enabled(config, self._traces),
            extensions=extensions(config, explicit=explicit),
        )
