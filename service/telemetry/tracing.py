"""Traces requests with OpenTelemetry: spans are made when a request is over, and exported by its batch processor.

Spans contain no tensors, metadata or tokens. If the collector does not answer, traces are lost, and no request waits.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from opentelemetry import trace as api
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import bf16kit
from bf16kit.messages.errors import ConfigError
from bf16kit.service.request import Observation, Timings
from bf16kit.service.telemetry.families import TraceOutcome
from bf16kit.service.telemetry.settings import TraceSettings

_log = logging.getLogger(__name__)
_LONGEST_TEXT = 256  # characters: request ids and unknown models' names come from clients
_GIVE_UP_S = 1.0  # wait for an aborted export to end
_PROPAGATOR = TraceContextTextMapPropagator()
_SERVICE = "inference.GRPCInferenceService"
_CODES = (  # in the order of their numbers
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
    "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
)  # fmt: skip
#: The codes that the semantic conventions list as server errors. The others may be the client's errors.
_ERRORS = ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")


class _LastError(logging.Handler):
    """Keeps the last error that was logged."""

    last = ""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR:
            self.last = record.getMessage()[:_LONGEST_TEXT]


class CountedExporter(SpanExporter):
    """OTLP over gRPC, as the OTEL_EXPORTER_OTLP_… variables say. Counts traces by what happened to them.

    OpenTelemetry logs each failed attempt. Instead, the last one is kept, to be logged once when failures begin.
    Raises ConfigError.
    """

    def __init__(self, count: Callable[[TraceOutcome, int], None]) -> None:
        for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
            if os.environ.get(name, "grpc") != "grpc":
                raise ConfigError(f"{name} is {os.environ[name]!r}: traces are exported over gRPC only; unset it")
        try:
            self._exporter = OTLPSpanExporter()
        except Exception as error:  # noqa: BLE001 -- of a kind of its own for each variable
            raise ConfigError(f"trace_rate: the OTEL_… variables cannot be used: {error}") from None
        self._count = count
        self._failing = False
        self._last_error = _LastError()
        attempts = logging.getLogger("opentelemetry.exporter")
        attempts.handlers[:] = [self._last_error]
        attempts.propagate = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export spans, and count those of requests: a trace's others may come in another batch."""
        result = self._exporter.export(spans)
        failed = result is not SpanExportResult.SUCCESS
        if traces := sum(span.kind is api.SpanKind.SERVER for span in spans):
            self._count("failed" if failed else "exported", traces)
        if failed is not self._failing:  # logged when failures begin and end, not for every batch
            self._failing = failed
            if failed:
                reason = self._last_error.last or "the collector did not answer in time"
                _log.warning("traces are being lost; requests are still served: %s", reason)
            else:
                _log.info("traces are delivered again")
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class _Ids(RandomIdGenerator):
    """OpenTelemetry's ids, except that a trace id is the one drawn when its request was sampled."""

    def __init__(self) -> None:
        self.drawn = threading.local()

    def generate_trace_id(self) -> int:
        return int(self.drawn.trace)


class Trace:
    """A :class:`bf16kit.service.request.Trace`, whose spans are made when its request ends."""

    __slots__ = ("_make_spans", "id")

    def __init__(self, trace_id: int, make_spans: Callable[[str, Observation], None]) -> None:
        self.id = f"{trace_id:032x}"
        self._make_spans = make_spans

    def end(self, rpc: str, observation: Observation) -> None:
        """See :meth:`bf16kit.service.request.Trace.end`."""
        try:
            self._make_spans(rpc, observation)
        except Exception:  # noqa: BLE001 -- the request was answered, and must not fail for want of its trace
            _log.exception("a request could not be traced")


class Tracing:
    """A :class:`bf16kit.service.request.Tracer`. Exports at intervals; :meth:`close` sends what still waits.

    Raises ConfigError for variables of OpenTelemetry that it cannot use.
    """

    def __init__(self, settings: TraceSettings, exporter: SpanExporter) -> None:
        self._settings = settings
        self._exporter = exporter
        self._ids = _Ids()
        try:
            self._provider = TracerProvider(
                sampler=ALWAYS_ON,  # spans are made of sampled requests only
                resource=_resource(),
                shutdown_on_exit=False,
                id_generator=self._ids,
                span_limits=SpanLimits(max_span_attribute_length=_LONGEST_TEXT),
            )
            self._provider.add_span_processor(BatchSpanProcessor(exporter))  # starts its thread
        except ValueError as error:
            raise ConfigError(f"traces: a variable OTEL_BSP_… or OTEL_SPAN_… cannot be used: {error}") from None
        self._tracer = self._provider.get_tracer("bf16kit", bf16kit.__version__)

    def sample(self, model: str, header: Callable[[str], str | bytes | None]) -> Trace | None:
        """See :meth:`bf16kit.service.request.Tracer.sample`."""
        if not self._settings.on:
            return None
        traceparent, context = header("traceparent"), Context()
        if isinstance(traceparent, str):
            context = _PROPAGATOR.extract(
                {"traceparent": traceparent, "tracestate": str(header("tracestate") or "")}, context
            )
        parent = api.get_current_span(context).get_span_context()
        if not self._settings.sampled(model, bool(parent.trace_flags.sampled) if parent.is_valid else None):
            return None
        trace_id = parent.trace_id or random.getrandbits(128)
        return Trace(trace_id, partial(self._make_spans, context, trace_id))

    def close(self, seconds: float) -> None:
        """Export waiting traces, for at most ``seconds``. The rest is lost."""
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)  # it may take 30 s
        closing.start()
        closing.join(max(0.0, seconds))
        if closing.is_alive():
            _log.warning("the last traces are lost: they could not be delivered before the server ended")
            self._exporter.shutdown()  # aborts an export in progress
            closing.join(_GIVE_UP_S)

    def _make_spans(self, context: Context, trace_id: int, rpc: str, observation: Observation) -> None:
        ended_ns, ended = time.time_ns(), time.monotonic()

        def at(moment: float) -> int:
            """Convert a moment on the clock of Timings to ns since the epoch."""
            return ended_ns - round((ended - moment) * 1e9)

        phases = list(_phases(observation.timings))
        self._ids.drawn.trace = trace_id
        begun = min([ended - observation.seconds, *(begin for _, begin, _, _ in phases)])
        server = self._tracer.start_span(
            f"{_SERVICE}/{rpc}", context, api.SpanKind.SERVER, _attributes(rpc, observation), start_time=at(begun)
        )
        if observation.code in _ERRORS:
            server.set_status(api.Status(api.StatusCode.ERROR, observation.code))
        inside = api.set_span_in_context(server, Context())
        for name, begin, end, attributes in phases:
            self._tracer.start_span(name, inside, attributes=attributes, start_time=at(begin)).end(at(end))
        server.end(ended_ns)


def _phases(timings: Timings | None) -> Iterator[tuple[str, float, float, dict[str, int]]]:
    """Yield the phases of a request that took time: name, begin and end on the clock of Timings, attributes."""
    if timings is None:
        return
    if timings.queue > 0:
        yield "queue", timings.arrived, timings.arrived + timings.queue, {}
    moment = timings.batch_started
    parts = ("gather", timings.compute_input), ("run", timings.compute_infer), ("split", timings.compute_output)
    for name, seconds in parts:
        if seconds > 0:
            rows = {"bf16kit.batch.rows": timings.rows} if name == "run" and timings.rows else {}  # 0: the batch failed
            yield name, moment, moment + seconds, rows
        moment += seconds


def _attributes(rpc: str, observation: Observation) -> dict[str, str | int]:
    known: dict[str, str | int] = {
        "rpc.system": "grpc",
        "rpc.service": _SERVICE,
        "rpc.method": rpc,
        "rpc.grpc.status_code": _CODES.index(observation.code),
        "bf16kit.model.name": observation.model,
    }
    optional: dict[str, str | int] = {
        "bf16kit.model.version": observation.version,
        "bf16kit.request.id": observation.request_id,
        "bf16kit.request.rows": observation.rows,
    }
    return known | {name: value for name, value in optional.items() if value}


def _resource() -> Resource:
    """Return the resource from OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES, with this server's defaults."""
    found = Resource.create({"service.version": bf16kit.__version__, "process.pid": os.getpid()})
    if str(found.attributes["service.name"]).startswith("unknown_service"):
        found = found.merge(Resource({"service.name": "bf16kit"}))
    return found
