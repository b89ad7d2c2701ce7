"""Spans of requests, made when they are over and exported by a thread of their own: the one file that knows
OpenTelemetry.

A request pays for the decision whether it is traced, and for its place in a queue. Nothing of what was in it, of its
metadata or of its token is in a span. Where the collector does not answer, traces are lost and counted.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, cast

from opentelemetry import trace as api
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import bf16kit
from bf16kit.errors import ConfigError
from service.request import Observation, Timings
from service.telemetry.tracesettings import TraceSettings
from service.telemetry.vocabulary import TraceOutcome

_log = logging.getLogger(__name__)
_SERVICE = "inference.GRPCInferenceService"
_WAITING = 2048  # requests: those over it are not traced
_TOGETHER = 100  # requests exported at once: up to 500 spans
_EVERY_S = 1.0
_BATCHES = 64  # whose requests are remembered, to link them
_LINKS = 32  # of one span, at most
_LONGEST_TEXT = 256  # characters: request ids and unknown models' names are the clients'
_GIVE_UP_S = 1.0  # for an export that was broken off to end
_CODES = (  # in the order of their numbers
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
    "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
)  # fmt: skip
#: The semantic conventions' list of codes that are a server's errors; the others may be the client's.
_ERRORS = ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")
_PROPAGATOR = TraceContextTextMapPropagator()


class Exporter(Protocol):
    """Where spans go."""

    def export(self, spans: list[Any]) -> str:
        """Deliver them; returns why they are lost, or nothing."""
        ...

    def close(self) -> None:
        """From any thread: no more, not even what is being exported."""
        ...


class _Heard(logging.Handler):
    """Keeps the last error that was logged."""

    last = ""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR:
            self.last = record.getMessage()[:_LONGEST_TEXT]


class Otlp:
    """Over gRPC to ``endpoint``, or, where that is empty, to what OTEL_EXPORTER_OTLP_… says. Raises ConfigError.

    OpenTelemetry logs each attempt that fails, and each by itself: that is kept for the reason, and not written.
    """

    def __init__(self, endpoint: str) -> None:
        for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
            if os.environ.get(name, "grpc") != "grpc":
                raise ConfigError(f"{name} is {os.environ[name]!r}: traces are exported over gRPC alone; unset it")
        try:
            self._exporter: Any = OTLPSpanExporter(endpoint=endpoint or None)
        except Exception as error:  # noqa: BLE001 -- of a kind of its own for each variable
            raise ConfigError(f"trace_exporter: the OTEL_… variables cannot be used: {error}") from None
        self._heard = _Heard()
        everything = logging.getLogger("opentelemetry")
        everything.handlers[:] = [self._heard]
        everything.propagate = False

    def export(self, spans: list[Any]) -> str:
        """See :meth:`Exporter.export`."""
        if self._exporter.export(spans).name == "SUCCESS":
            return ""
        return self._heard.last or "the collector gave no answer in time"

    def close(self) -> None:
        """See :meth:`Exporter.close`."""
        self._exporter.shutdown()


class Trace:
    """See :class:`service.request.Trace`."""

    __slots__ = ("_hand_over", "context", "id", "number")

    def __init__(self, hand_over: Callable[[_Ended], None], context: Context, number: int) -> None:
        self._hand_over = hand_over
        self.context = context
        self.number = number
        self.id = f"{number:032x}"

    def end(self, rpc: str, seen: Observation) -> None:
        """See :meth:`service.request.Trace.end`."""
        short = seen._replace(
            model=seen.model[:_LONGEST_TEXT],
            version=seen.version[:_LONGEST_TEXT],
            request_id=seen.request_id[:_LONGEST_TEXT],
        )
        self._hand_over(_Ended(self, rpc, short, time.time_ns(), time.monotonic()))


class _Ended(NamedTuple):
    trace: Trace
    rpc: str
    seen: Observation
    ended_ns: int  # since the epoch
    ended: float  # the same moment on the clock of Timings

    def at(self, moment: float) -> int:
        """A moment on that clock, in ns since the epoch."""
        return self.ended_ns - round((self.ended - moment) * 1e9)


class Tracing:
    """See :class:`service.request.Tracer`. :meth:`start` it; :meth:`close` sends what still waits.

    ``counted`` is told what became of how many traced requests.
    """

    def __init__(
        self, settings: TraceSettings, exporter: Exporter, counted: Callable[[TraceOutcome, int], None]
    ) -> None:
        self._settings = settings
        self._exporter = exporter
        self._counted = counted
        self._recorder = _Recorder()
        self._ended: deque[_Ended] = deque()
        self._wake = threading.Event()
        self._closing = self._failing = False
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def sample(self, model: str, header: Callable[[str], str | bytes | None]) -> Trace | None:
        """See :meth:`service.request.Tracer.sample`."""
        if not self._settings.on:
            return None
        given, context = header("traceparent"), Context()
        if isinstance(given, str):
            context = _PROPAGATOR.extract(
                {"traceparent": given, "tracestate": str(header("tracestate") or "")}, context
            )
        parent = api.get_current_span(context).get_span_context()
        if not self._settings.sampled(model, bool(parent.trace_flags.sampled) if parent.is_valid else None):
            return None
        return Trace(self._take_over, context, parent.trace_id or random.getrandbits(128))

    def close(self, seconds: float) -> None:
        """Export what waits, for so long; what is left then is lost, and counted."""
        self._closing = True
        self._wake.set()
        self._thread.join(max(0.0, seconds))
        self._exporter.close()  # breaks off an export that is at work
        self._thread.join(_GIVE_UP_S)
        if self._ended:
            self._counted("dropped", len(self._ended))
            _log.warning("%d traces are lost: they could not be delivered before the end", len(self._ended))

    def _take_over(self, ended: _Ended) -> None:
        waiting = len(self._ended)
        if waiting >= _WAITING or self._closing:
            self._counted("dropped", 1)
            return
        self._ended.append(ended)
        if waiting >= _TOGETHER:
            self._wake.set()

    # --- on the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        last = False
        while not last:
            self._wake.wait(_EVERY_S)
            self._wake.clear()
            last = self._closing
            while batch := self._batch():
                self._export(batch)

    def _batch(self) -> list[_Ended]:
        return [self._ended.popleft() for _ in range(min(_TOGETHER, len(self._ended)))]

    def _export(self, batch: list[_Ended]) -> None:
        try:
            why = self._exporter.export(self._recorder.spans(batch))
        except Exception as error:  # noqa: BLE001 -- this thread must live on
            why = f"{type(error).__name__}: {error}"
        self._counted("failed" if why else "exported", len(batch))
        if bool(why) is not self._failing:  # said when it begins and when it ends, not for every batch
            self._failing = bool(why)
            if why:
                _log.warning("traces are lost, and requests go on being served: %s", why)
            else:
                _log.info("traces are delivered again")


class _Recorder:
    """Makes spans with OpenTelemetry's own tracer, of requests that are over. For one thread."""

    def __init__(self) -> None:
        self._made: list[Any] = []
        self._ids = _Ids()
        provider: Any = TracerProvider(
            sampler=ALWAYS_ON,  # what comes here is sampled
            resource=_resource(),
            shutdown_on_exit=False,
            id_generator=cast(Any, self._ids),
            span_limits=SpanLimits(max_span_attribute_length=_LONGEST_TEXT),
        )
        provider.add_span_processor(self)
        self._tracer = provider.get_tracer("bf16kit", bf16kit.__version__)
        self._batches: OrderedDict[tuple[str, str, float], list[Any]] = OrderedDict()

    def spans(self, batch: list[_Ended]) -> list[Any]:
        """Of all of these requests."""
        self._made = []
        for ended in batch:
            self._record(ended)
        return self._made

    def _record(self, ended: _Ended) -> None:
        seen, phases = ended.seen, list(_phases(ended))
        self._ids.trace = ended.trace.number
        begun = min([ended.at(ended.ended - seen.seconds), *(start for _, start, _ in phases)])
        server = self._tracer.start_span(
            f"{_SERVICE}/{ended.rpc}", ended.trace.context, api.SpanKind.SERVER, _attributes(ended), start_time=begun
        )
        if seen.code in _ERRORS:
            server.set_status(api.Status(api.StatusCode.ERROR, seen.code))
        inside = api.set_span_in_context(server, Context())
        for name, start, end in phases:
            more = self._of_batch(seen, seen.timings, server) if name == "run" and seen.timings else {}
            self._tracer.start_span(name, inside, start_time=start, **more).end(end)
        server.end(ended.ended_ns)

    def _of_batch(self, seen: Observation, timings: Timings, server: Any) -> dict[str, Any]:
        """What the span of a run says of its batch: its rows, unless it failed, and links to the requests in it whose
        spans were made before."""
        key = (seen.model, seen.version, timings.begun)
        shared = self._batches.setdefault(key, [])
        links = [api.Link(context) for context in shared]
        if len(shared) < _LINKS:
            shared.append(server.get_span_context())
        if len(self._batches) > _BATCHES:
            self._batches.popitem(last=False)
        return {"attributes": {"bf16kit.batch.rows": timings.rows} if timings.rows else {}, "links": links}

    # --- OpenTelemetry's interface of what is told of spans -----------------------------------------------------------

    def on_start(self, span: Any, parent_context: Any = None) -> None: ...
    def _on_ending(self, span: Any) -> None: ...
    def on_end(self, span: Any) -> None:
        self._made.append(span)


class _Ids:
    """OpenTelemetry's generator of ids, but that a trace's was drawn when its request was sampled."""

    trace = 0

    def generate_trace_id(self) -> int:
        return self.trace

    def generate_span_id(self) -> int:
        return random.getrandbits(64) or 1

    def is_trace_id_random(self) -> bool:
        return True


def _phases(ended: _Ended) -> Iterator[tuple[str, int, int]]:
    """The parts of a request that took time: name, begin and end in ns since the epoch."""
    timings = ended.seen.timings
    if timings is None:
        return
    if timings.queue > 0:
        yield "queue", ended.at(timings.arrived), ended.at(timings.arrived + timings.queue)
    moment = timings.begun
    parts = ("gather", timings.compute_input), ("run", timings.compute_infer), ("split", timings.compute_output)
    for name, seconds in parts:
        if seconds > 0:
            yield name, ended.at(moment), ended.at(moment + seconds)
        moment += seconds


def _attributes(ended: _Ended) -> dict[str, str | int]:
    seen = ended.seen
    known: dict[str, str | int] = {
        "rpc.system": "grpc",
        "rpc.service": _SERVICE,
        "rpc.method": ended.rpc,
        "rpc.grpc.status_code": _CODES.index(seen.code),
        "bf16kit.model.name": seen.model,
    }
    told: dict[str, str | int] = {
        "bf16kit.model.version": seen.version,
        "bf16kit.request.id": seen.request_id,
        "bf16kit.request.rows": seen.rows,
    }
    return known | {name: value for name, value in told.items() if value}


def _resource() -> Any:
    """What OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say of this server, and what they do not."""
    found: Any = Resource.create({"service.version": bf16kit.__version__, "process.pid": os.getpid()})
    if str(found.attributes["service.name"]).startswith("unknown_service"):
        found = found.merge(Resource({"service.name": "bf16kit"}))
    return found
