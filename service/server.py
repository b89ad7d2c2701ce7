"""One process that serves models: wires its models, their metrics and drift, its ports, and its drain."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from bf16kit.messages.errors import ConfigError
from service.config.credentials import Credentials
from service.config.guard import Guard
from service.config.heap import HeapTrimmer
from service.config.logsettings import LogSettings
from service.config.periodic import PeriodicThread
from service.config.serverconfig import ServerConfig
from service.config.stop import Ending, OnStarted, Stop
from service.contract import Registry
from service.drift.owner import FallbackOwner
from service.grpc.credentials import Access
from service.grpc.direct import DirectTransport
from service.grpc.options import TransportOptions
from service.grpc.server import Transport
from service.http.evidence import evidence_route
from service.http.pages import routes
from service.http.views import StatusReader
from service.leader import announce, open_http, open_regions
from service.models.controller import Controller
from service.models.listing import RepositoryListing
from service.models.plan import DesiredModel
from service.models.poll import RepositoryPoller
from service.models.repository import Repository
from service.models.retries import Retries
from service.models.singleprocess import SingleProcess
from service.operations import MODEL_CONTROL, Operations, ReadOnly, RegistryModels, Settings
from service.request import Tracer
from service.shadow.combinedmetrics import CombinedMetrics
from service.shadow.process import ShadowProcess
from service.shadow.samplesender import PlanSampleSender
from service.telemetry.history import NAMES, TICK_SECONDS, History
from service.telemetry.metrics import Metrics
from service.telemetry.tracesettings import TraceSettings
from service.telemetry.vocabulary import TraceOutcome

if TYPE_CHECKING:
    from service.telemetry.tracing import Tracing

_log = logging.getLogger(__name__)
_MAINTAIN_SECONDS = 0.1
_LAST_TRACES_SECONDS = 3.0  # the longest that a stop waits to export the last traces


def serve_single_process(
    config: ServerConfig, stop: Stop, on_started: OnStarted = lambda grpc_port, http_port: None
) -> Ending:
    """Serve until ``stop`` is set, then drain. The server is live at once, and ready when its models are loaded.

    Raises ConfigError for a port in use.
    """
    served = ModelServer(config)
    try:
        transport = build_transport(
            config, served.repository, served.metrics.refused, served.credentials, served.operations, served.tracing
        )
        port = transport.start()
    except BaseException:
        served.http.close()
        raise

    def listening() -> None:
        announce(config, port, served.http.port)
        on_started(port, served.http.port)

    try:
        served.start(port, listening)
        while not stop.wait(_MAINTAIN_SECONDS):
            served.maintain()
        return served.drain(transport)
    finally:
        served.close()


class ModelServer:
    """The models, metrics and HTTP port of one process. The constructor binds the HTTP port and starts nothing.

    Call :meth:`start`, then :meth:`maintain` about ten times a second, then :meth:`drain`; in any case :meth:`close`.
    ``desired_models``: serve exactly these; the repository is not read, and clients cannot load models.
    """

    def __init__(self, config: ServerConfig, desired_models: Iterable[DesiredModel] | None = None) -> None:
        self.config = config
        self.metrics = Metrics()
        self._owner = FallbackOwner(
            SingleProcess(lambda: self.repository), lambda *version: self._shadow.restart(*version)
        )
        self._counting = CombinedMetrics(
            self.metrics,
            lambda: self._shadow.ask_counts(),
            lambda: [(slot.name, slot.version) for slot in self.repository.models()],
        )
        self._shadow = ShadowProcess(
            config,
            self._counting.receive,
            self._counting.process_died,
            self._owner.receive,
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
            on_verdict=self._owner.receive,
        )
        self._controller, self._poll = None, None
        if desired_models is None:
            self._controller = Controller(
                config.repository,
                self.repository.apply,
                self.repository.apply_all,
                config.model_control,
                config.load_model,
                Retries(self.repository.models),
                self.repository.models,
            )
            self._controller.apply_initial()
            if config.model_control == "poll":
                self._poll = RepositoryPoller(self._controller, config.poll_seconds)
        else:
            self.repository.apply_all(desired_models)
        self.credentials = Credentials.of(config)
        self._traces, self.tracing = open_tracing(config, self.repository, self.metrics.traced)
        self.operations = self._operations()
        self._history = History(lambda: self._counting.samples(NAMES))
        self._status = StatusReader(self.repository, self._history, off_reason=self._shadow.off_reason)
        evidence = evidence_route(self.repository, self._shadow.evidence if config.evidence else None)
        pages = routes(self.repository, self._counting, self._status.snapshot, evidence)
        self.http = open_http(config, pages, self.metrics, self.credentials)
        self._guard = Guard()
        self._heap = HeapTrimmer()
        self._history_thread = PeriodicThread("history", TICK_SECONDS, self._history.tick)

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
        self._history_thread.start()

    def maintain(self) -> None:
        """Do the periodic work of shadow process and fallback. Call it about ten times a second, on one thread.

        An error in it is logged, and does not end the caller's loop.
        """
        self._guard.run("the shadow's maintenance", self._shadow.maintain)
        self._guard.run("the fallback's maintenance", self._owner.maintain)

    def drain(self, source: RequestSource) -> Ending:
        """Report not ready, then reject new requests, then wait for those in flight. HTTP is served until the end."""
        self._history_thread.stop()
        self._heap.stop()
        if self._poll is not None:
            self._poll.stop()
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


class RequestSource(Protocol):
    """The source of requests that a drain stops: a :class:`Transport` or a :class:`DirectTransport`."""

    def stop(self, grace: float) -> bool: ...


def build_transport(
    config: ServerConfig,
    registry: Registry,
    count_refusal: Callable[[str], None],
    credentials: Credentials,
    operations: Operations = Operations(),  # noqa: B008 -- frozen: nothing but inference and looking
    tracer: Tracer | None = None,
) -> Transport:
    """Return a transport that is not started yet. Several workers share its port."""
    access = Access(credentials.tokens, frozenset(config.token_free))
    options = transport_options(config)
    return Transport(registry, count_refusal, options, access, credentials.certificates, operations, tracer)


def build_direct_transport(
    config: ServerConfig,
    registry: Registry,
    count_refusal: Callable[[str], None],
    credentials: Credentials,
    operations: Operations,
    tracer: Tracer | None = None,
) -> DirectTransport:
    """Return the same RPCs without a port, for a caller that brings requests by another way."""
    access = Access(credentials.tokens, frozenset(config.token_free))
    return DirectTransport(registry, count_refusal, transport_options(config), access, operations, tracer)


def open_tracing(
    config: ServerConfig, registry: Registry, count_traces: Callable[[TraceOutcome, int], None]
) -> tuple[TraceSettings, Tracing | None]:
    """Return the trace settings, and the tracing that exports spans, not started yet; None if spans are not exported.

    Raises ConfigError if OpenTelemetry is not installed.
    """
    exports = config.trace_exporter != "none" and os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() != "true"
    settings = TraceSettings(exports=exports, rate=config.trace_rate, find=lambda model: registry.find(model, ""))
    if not exports:
        return settings, None
    try:
        from service.telemetry.tracing import OtlpExporter, Tracing
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        raise ConfigError("trace_exporter: otlp needs OpenTelemetry: pip install 'bf16kit[otel]'") from None
    return settings, Tracing(settings, OtlpExporter(config.trace_endpoint), count_traces)


def read_only_unless_enabled(config: ServerConfig, settings: Settings) -> Settings:
    """Return ``settings``, read-only unless the configuration lets clients change them."""
    return settings if config.change_settings else ReadOnly(settings, "start with change_settings: true")


def extensions(config: ServerConfig, *, explicit: bool) -> tuple[str, ...]:
    """Return the protocol's optional extensions that are on. ``explicit``: clients load and unload models."""
    memory = ("system_shared_memory",) if config.shared_memory else ()
    return ("logging", "trace", *memory, *(MODEL_CONTROL if explicit else ()))


def drain(repository: Repository, source: RequestSource, seconds: float) -> Ending:
    """Reject new requests, and give those in flight ``seconds`` to finish. Returns how that ended."""
    until = time.monotonic() + seconds
    repository.drain()
    completed = source.stop(seconds)
    freed = repository.close(max(1.0, until - time.monotonic()))
    return Ending(completed, freed and completed)


def transport_options(config: ServerConfig) -> TransportOptions:
    """Return the part of the configuration that the transport needs."""
    return TransportOptions(
        host=config.host,
        port=config.grpc_port,
        unix_socket=str(config.grpc_socket or ""),
        compress=config.compress,
        max_connections=config.max_connections,
        max_in_flight=config.max_in_flight,
        max_streams=config.max_streams,
        max_watches=config.max_watches,
        max_message_bytes=config.max_message_bytes,
        max_request_bytes=config.max_request_bytes,
        receive_seconds=config.receive_seconds,
        send_seconds=config.send_seconds,
        stream_idle_seconds=config.stream_idle_seconds,
        keepalive_seconds=config.keepalive_seconds,
        max_connection_idle_seconds=config.max_connection_idle_seconds,
        max_connection_age_seconds=config.max_connection_age_seconds,
        overload=config.overload_status,
        share_port=config.workers > 1,
    )
