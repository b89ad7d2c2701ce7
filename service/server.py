"""One process that serves models: wires its models, their metrics and drift, its ports, and its drain."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from bf16kit.messages.errors import ConfigError
from bf16kit.service.config.certificates import Credentials
from bf16kit.service.config.loops import Ending, OnStarted, Stop
from bf16kit.service.config.resources import HeapTrimmer, max_request_bytes
from bf16kit.service.config.serverconfig import ServerConfig
from bf16kit.service.contract import Registry
from bf16kit.service.grpc.transport import Transport, TransportOptions
from bf16kit.service.leader import MAINTAIN_SECONDS, Leader, announce, open_regions
from bf16kit.service.models.plan import DesiredModel
from bf16kit.service.models.repository import Repository, RepositoryListing
from bf16kit.service.operations import (
    MODEL_CONTROL,
    ModelControl,
    Operations,
    ReadOnly,
    Regions,
    RegistryModels,
    Settings,
)
from bf16kit.service.request import Tracer
from bf16kit.service.rest.restapp import RestApp
from bf16kit.service.shadow.samples import PlanSampleSender
from bf16kit.service.telemetry.families import TraceOutcome
from bf16kit.service.telemetry.metrics import Metrics
from bf16kit.service.telemetry.settings import LogSettings, TraceSettings
from bf16kit.system import controlgroup

if TYPE_CHECKING:
    from bf16kit.service.telemetry.tracing import Tracing

_log = logging.getLogger(__name__)
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
        if config.http_inference:
            served.http.answer_inference(RestApp(transport, served.http.access, config.max_message_bytes))
        port = transport.start()
        served.start(port)
        announce(config, port, served.http.port)
        on_started(port, served.http.port)
        while not stop.wait(MAINTAIN_SECONDS):
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
        self.repository = Repository(
            self.metrics,
            device=config.device,
            threads=config.threads,
            ready_when_empty=config.model_control == "explicit",
            new_sender=lambda name, plan: PlanSampleSender(
                name, plan, partial(self._leader.shadow.ask, plan), self._leader.shadow.forget
            ),
            on_verdict=lambda verdict: self._leader.fallback.receive(verdict),
        )
        traces, self.tracing = open_tracing(config, self.repository, self.metrics.traced)
        regions = open_regions(config)
        fixed = desired_models is not None
        self._leader = Leader(config, self.metrics, self.repository, self.repository, fixed=fixed)
        if desired_models is not None:
            self.repository.apply_all(desired_models)
        self.credentials, self.http, controller = self._leader.credentials, self._leader.http, self._leader.controller
        listing = RegistryModels(self.repository)
        models = listing if controller is None else RepositoryListing(self.repository, controller)
        logs = LogSettings(config.log_level, config.log_format)
        self.operations = operations_of(config, models, controller, regions, logs, traces)
        self._heap = HeapTrimmer()

    def start(self, grpc_port: int) -> None:
        """Serve HTTP, then load the models in the background."""
        self._leader.start(grpc_port)
        for model in self.repository.models():
            _log.info("%s: %s", model.label, model.state)
        self.repository.start()
        self._heap.start()

    def maintain(self) -> None:
        """Do the periodic work of shadow process and fallback. Call it about ten times a second, on one thread."""
        self._leader.maintain()

    def drain(self, source: RequestSource) -> Ending:
        """Report not ready, then reject new requests, then wait for those in flight. HTTP is served until the end."""
        self._heap.stop()
        finish = partial(drain, self.repository, source, self.tracing, _LAST_TRACES_SECONDS)
        return self._leader.drain(self.repository.retire, finish)

    def close(self) -> None:
        """See :meth:`Leader.close`."""
        self._leader.close()


class RequestSource(Protocol):
    """The source of requests that a drain stops: a :class:`Transport`, or a replica behind Ray."""

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
    options = transport_options(config)
    return Transport(registry, count_refusal, options, credentials.tokens, credentials.certificates, operations, tracer)


def open_tracing(
    config: ServerConfig, registry: Registry, count_traces: Callable[[TraceOutcome, int], None]
) -> tuple[TraceSettings, Tracing | None]:
    """Return the trace settings, and the tracing that exports spans; None if spans are not exported.

    Raises ConfigError if OpenTelemetry is not installed, or its variables cannot be used.
    """
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    rate = 0 if disabled else config.trace_rate
    settings = TraceSettings(rate, find=lambda model: registry.find(model, ""))
    if not rate:
        return settings, None
    try:
        from bf16kit.service.telemetry.tracing import CountedExporter, Tracing
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        raise ConfigError(f"trace_rate {rate} needs OpenTelemetry: pip install 'bf16kit[otel]'") from None
    return settings, Tracing(settings, CountedExporter(count_traces))


def operations_of(
    config: ServerConfig,
    models: RegistryModels,
    control: ModelControl | None,
    regions: Regions | None,
    logs: Settings,
    traces: Settings,
) -> Operations:
    """Return what clients may do by the configuration. Settings are read-only unless clients manage the server."""
    explicit = control is not None and config.model_control == "explicit"
    remedy = "start with --model-control explicit"
    memory = () if regions is None else ("system_shared_memory",)
    rest = ("binary_tensor_data",) if config.http_inference else ()
    return Operations(
        models=models,
        control=control if explicit else None,
        regions=regions,
        logs=logs if config.model_control == "explicit" else ReadOnly(logs, remedy),
        traces=traces if config.model_control == "explicit" else ReadOnly(traces, remedy),
        extensions=("logging", "trace", *memory, *rest, *(MODEL_CONTROL if explicit else ())),
    )


def drain(
    repository: Repository, source: RequestSource, tracing: Tracing | None, last_traces_seconds: float, seconds: float
) -> Ending:
    """Reject new requests, and give those in flight ``seconds`` to finish. Returns how that ended.

    Waits for the export of the last traces until then, a second at least and ``last_traces_seconds`` at most.
    """
    until = time.monotonic() + seconds
    repository.drain()
    completed = source.stop(seconds)
    freed = repository.close(max(1.0, until - time.monotonic()))
    if tracing is not None:
        tracing.close(min(last_traces_seconds, max(1.0, until - time.monotonic())))
    return Ending(completed, freed and completed)


def transport_options(config: ServerConfig) -> TransportOptions:
    """Return the part of the configuration that the transport needs."""
    return TransportOptions(
        host=config.host,
        port=config.grpc_port,
        max_in_flight=config.max_in_flight,
        max_message_bytes=config.max_message_bytes,
        max_request_bytes=max_request_bytes(config, controlgroup.memory()),
        max_connection_age_seconds=config.max_connection_age_seconds,
        share_port=config.workers > 1,
    )
