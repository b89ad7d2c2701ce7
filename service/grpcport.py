"""Build the gRPC port from the configuration: the transport around a registry."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from bf16kit.messages.errors import ConfigError
from bf16kit.system import controlgroup
from service.config.certificates import Credentials
from service.config.resources import max_request_bytes
from service.config.serverconfig import ServerConfig
from service.config.stop import Ending
from service.contract import Registry
from service.grpc.server import Transport, TransportOptions
from service.models.repository import Repository
from service.operations import MODEL_CONTROL, Operations, ReadOnly, Settings
from service.request import Tracer
from service.telemetry.families import TraceOutcome
from service.telemetry.tracesettings import TraceSettings

if TYPE_CHECKING:
    from service.telemetry.tracing import Tracing


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
    """Return the trace settings, and the tracing that exports spans, not started yet; None if spans are not exported.

    Raises ConfigError if OpenTelemetry is not installed.
    """
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    rate = 0 if disabled else config.trace_rate
    settings = TraceSettings(rate, find=lambda model: registry.find(model, ""))
    if not rate:
        return settings, None
    try:
        from service.telemetry.tracing import CountedExporter, Tracing
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        raise ConfigError(f"trace_rate {rate} needs OpenTelemetry: pip install 'bf16kit[otel]'") from None
    return settings, Tracing(settings, CountedExporter(count_traces))


def read_only_unless_enabled(config: ServerConfig, settings: Settings) -> Settings:
    """Return ``settings``, read-only unless clients manage the server."""
    return settings if config.model_control == "explicit" else ReadOnly(settings, "start with --model-control explicit")


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
        max_in_flight=config.max_in_flight,
        max_message_bytes=config.max_message_bytes,
        max_request_bytes=max_request_bytes(config, controlgroup.memory()),
        max_connection_age_seconds=config.max_connection_age_seconds,
        share_port=config.workers > 1,
    )
