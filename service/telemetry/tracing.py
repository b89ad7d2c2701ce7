"""Traces requests: spans are made when a request is over, and exported by a separate thread.

A request only pays for the decision whether it is traced and for a place in a queue. Spans contain no tensors, metadata
or tokens. If the collector does not answer, traces are lost and counted.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from opentelemetry import trace as api
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from bf16kit.messages.errors import ConfigError
from service.request import Observation
from service.telemetry.spans import LONGEST_TEXT, FinishedRequest, SpanRecorder
from service.telemetry.tracesettings import TraceSettings
from service.telemetry.vocabulary import TraceOutcome

_log = logging.getLogger(__name__)
_MOST_WAITING = 2048  # requests; further ones are not traced
_BATCH_SIZE = 100  # requests exported at once: up to 500 spans
_INTERVAL_S = 1.0
_GIVE_UP_S = 1.0  # wait for an aborted export to end
_PROPAGATOR = TraceContextTextMapPropagator()


class Exporter(Protocol):
    """The destination of spans."""

    def export(self, spans: list[Any]) -> str:
        """Deliver spans. Return why they are lost, or ""."""
        ...

    def close(self) -> None:
        """Stop exporting, and abort an export in progress. For any thread."""
        ...


class _LastError(logging.Handler):
    """Keeps the last error that was logged."""

    last = ""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR:
            self.last = record.getMessage()[:LONGEST_TEXT]


class OtlpExporter:
    """Exports over gRPC to ``endpoint``, or, if that is empty, as the OTEL_EXPORTER_OTLP_… variables say.

    Raises ConfigError. OpenTelemetry logs each failed attempt separately; the last one is kept as the reason of a
    failure instead of being logged.
    """

    def __init__(self, endpoint: str) -> None:
        for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
            if os.environ.get(name, "grpc") != "grpc":
                raise ConfigError(f"{name} is {os.environ[name]!r}: traces are exported over gRPC only; unset it")
        try:
            self._exporter: Any = OTLPSpanExporter(endpoint=endpoint or None)
        except Exception as error:  # noqa: BLE001 -- of a kind of its own for each variable
            raise ConfigError(f"trace_exporter: the OTEL_… variables cannot be used: {error}") from None
        self._last_error = _LastError()
        everything = logging.getLogger("opentelemetry")
        everything.handlers[:] = [self._last_error]
        everything.propagate = False

    def export(self, spans: list[Any]) -> str:
        """See :meth:`Exporter.export`."""
        if self._exporter.export(spans).name == "SUCCESS":
            return ""
        return self._last_error.last or "the collector did not answer in time"

    def close(self) -> None:
        """See :meth:`Exporter.close`."""
        self._exporter.shutdown()


class Trace:
    """A :class:`service.request.Trace`, which is handed over for export when its request ends."""

    __slots__ = ("_enqueue", "context", "id", "trace_id")

    def __init__(self, enqueue: Callable[[FinishedRequest], None], context: Context, trace_id: int) -> None:
        self._enqueue = enqueue
        self.context = context
        self.trace_id = trace_id
        self.id = f"{trace_id:032x}"

    def end(self, rpc: str, observation: Observation) -> None:
        """See :meth:`service.request.Trace.end`."""
        short = observation._replace(
            model=observation.model[:LONGEST_TEXT],
            version=observation.version[:LONGEST_TEXT],
            request_id=observation.request_id[:LONGEST_TEXT],
        )
        self._enqueue(FinishedRequest(self.context, self.trace_id, rpc, short, time.time_ns(), time.monotonic()))


class Tracing:
    """A :class:`service.request.Tracer`. :meth:`start` begins exporting; :meth:`close` sends what still waits.

    ``count_outcome`` is called with an outcome and the number of traced requests that had it.
    """

    def __init__(
        self, settings: TraceSettings, exporter: Exporter, count_outcome: Callable[[TraceOutcome, int], None]
    ) -> None:
        self._settings = settings
        self._exporter = exporter
        self._count_outcome = count_outcome
        self._recorder = SpanRecorder()
        self._queue: deque[FinishedRequest] = deque()
        self._wake = threading.Event()
        self._closing = self._failing = False
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def sample(self, model: str, header: Callable[[str], str | bytes | None]) -> Trace | None:
        """See :meth:`service.request.Tracer.sample`."""
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
        return Trace(self._enqueue, context, parent.trace_id or random.getrandbits(128))

    def close(self, seconds: float) -> None:
        """Export waiting traces, for at most ``seconds``. The rest is lost and counted."""
        self._closing = True
        self._wake.set()
        self._thread.join(max(0.0, seconds))
        self._exporter.close()  # aborts an export in progress
        self._thread.join(_GIVE_UP_S)
        if self._queue:
            self._count_outcome("dropped", len(self._queue))
            _log.warning("%d traces are lost: they could not be delivered before the server ended", len(self._queue))

    def _enqueue(self, request: FinishedRequest) -> None:
        waiting = len(self._queue)
        if waiting >= _MOST_WAITING or self._closing:
            self._count_outcome("dropped", 1)
            return
        self._queue.append(request)
        if waiting >= _BATCH_SIZE:
            self._wake.set()

    # --- on the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        last = False
        while not last:
            self._wake.wait(_INTERVAL_S)
            self._wake.clear()
            last = self._closing
            while batch := self._batch():
                self._export(batch)

    def _batch(self) -> list[FinishedRequest]:
        return [self._queue.popleft() for _ in range(min(_BATCH_SIZE, len(self._queue)))]

    def _export(self, batch: list[FinishedRequest]) -> None:
        try:
            reason = self._exporter.export(self._recorder.spans(batch))
        except Exception as error:  # noqa: BLE001 -- this thread must live on
            reason = f"{type(error).__name__}: {error}"
        self._count_outcome("failed" if reason else "exported", len(batch))
        if bool(reason) is not self._failing:  # logged when failures begin and end, not for every batch
            self._failing = bool(reason)
            if reason:
                _log.warning("traces are being lost; requests are still served: %s", reason)
            else:
                _log.info("traces are delivered again")
