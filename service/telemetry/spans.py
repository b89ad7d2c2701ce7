"""Makes the spans of finished requests, with OpenTelemetry's own tracer."""

from __future__ import annotations

import os
import random
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

from opentelemetry import trace as api
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

import bf16kit
from service.request import Observation, Timings

LONGEST_TEXT = 256  # characters: request ids and unknown models' names come from clients
_SERVICE = "inference.GRPCInferenceService"
_BATCHES = 64  # batches whose requests are remembered for links
_LINKS = 32  # most links of one span
_CODES = (  # in the order of their numbers
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
    "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
)  # fmt: skip
#: The codes that the semantic conventions list as server errors. The others may be the client's errors.
_ERRORS = ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")


class FinishedRequest(NamedTuple):
    """A finished traced request. ``context`` is its parent's; ``trace_id`` is its trace id."""

    context: Context
    trace_id: int
    rpc: str
    observation: Observation
    ended_ns: int  # since the epoch
    ended_at: float  # the same moment on the clock of Timings, in seconds

    def at(self, moment: float) -> int:
        """Convert a moment on that clock to ns since the epoch."""
        return self.ended_ns - round((self.ended_at - moment) * 1e9)


class SpanRecorder:
    """Makes spans of finished requests with OpenTelemetry's own tracer. For one thread."""

    def __init__(self) -> None:
        self._spans: list[Any] = []
        self._ids = _Ids()
        provider: Any = TracerProvider(
            sampler=ALWAYS_ON,  # only sampled requests come here
            resource=_resource(),
            shutdown_on_exit=False,
            id_generator=cast(Any, self._ids),
            span_limits=SpanLimits(max_span_attribute_length=LONGEST_TEXT),
        )
        provider.add_span_processor(self)
        self._tracer = provider.get_tracer("bf16kit", bf16kit.__version__)
        self._contexts_by_batch: OrderedDict[tuple[str, str, float], list[Any]] = OrderedDict()

    def spans(self, batch: list[FinishedRequest]) -> list[Any]:
        """Return the spans of these requests."""
        self._spans = []
        for request in batch:
            self._record(request)
        return self._spans

    def _record(self, request: FinishedRequest) -> None:
        observation, phases = request.observation, list(_phases(request))
        self._ids.trace = request.trace_id
        start_ns = min([request.at(request.ended_at - observation.seconds), *(start for _, start, _ in phases)])
        server = self._tracer.start_span(
            f"{_SERVICE}/{request.rpc}", request.context, api.SpanKind.SERVER, _attributes(request), start_time=start_ns
        )
        if observation.code in _ERRORS:
            server.set_status(api.Status(api.StatusCode.ERROR, observation.code))
        inside = api.set_span_in_context(server, Context())
        for name, start, end in phases:
            more = (
                self._batch_details(observation, observation.timings, server)
                if name == "run" and observation.timings
                else {}
            )
            self._tracer.start_span(name, inside, start_time=start, **more).end(end)
        server.end(request.ended_ns)

    def _batch_details(self, observation: Observation, timings: Timings, server: Any) -> dict[str, Any]:
        """Return the attributes and links of a run's span.

        They are the batch's rows, unless it failed, and links to earlier spans of requests in the same batch.
        """
        key = (observation.model, observation.version, timings.batch_started)
        shared = self._contexts_by_batch.setdefault(key, [])
        links = [api.Link(context) for context in shared]
        if len(shared) < _LINKS:
            shared.append(server.get_span_context())
        if len(self._contexts_by_batch) > _BATCHES:
            self._contexts_by_batch.popitem(last=False)
        return {"attributes": {"bf16kit.batch.rows": timings.rows} if timings.rows else {}, "links": links}

    # --- OpenTelemetry's interface of span processors -----------------------------------------------------------------

    def on_start(self, span: Any, parent_context: Any = None) -> None: ...
    def _on_ending(self, span: Any) -> None: ...
    def on_end(self, span: Any) -> None:
        self._spans.append(span)


class _Ids:
    """OpenTelemetry's id generator, except that a trace id is the one drawn when its request was sampled."""

    trace = 0

    def generate_trace_id(self) -> int:
        return self.trace

    def generate_span_id(self) -> int:
        return random.getrandbits(64) or 1

    def is_trace_id_random(self) -> bool:
        return True


def _phases(request: FinishedRequest) -> Iterator[tuple[str, int, int]]:
    """Yield the phases of a request that took time: name, begin and end in ns since the epoch."""
    timings = request.observation.timings
    if timings is None:
        return
    if timings.queue > 0:
        yield "queue", request.at(timings.arrived), request.at(timings.arrived + timings.queue)
    moment = timings.batch_started
    parts = ("gather", timings.compute_input), ("run", timings.compute_infer), ("split", timings.compute_output)
    for name, seconds in parts:
        if seconds > 0:
            yield name, request.at(moment), request.at(moment + seconds)
        moment += seconds


def _attributes(request: FinishedRequest) -> dict[str, str | int]:
    observation = request.observation
    known: dict[str, str | int] = {
        "rpc.system": "grpc",
        "rpc.service": _SERVICE,
        "rpc.method": request.rpc,
        "rpc.grpc.status_code": _CODES.index(observation.code),
        "bf16kit.model.name": observation.model,
    }
    optional: dict[str, str | int] = {
        "bf16kit.model.version": observation.version,
        "bf16kit.request.id": observation.request_id,
        "bf16kit.request.rows": observation.rows,
    }
    return known | {name: value for name, value in optional.items() if value}


def _resource() -> Any:
    """Return the resource from OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES, with this server's defaults."""
    found: Any = Resource.create({"service.version": bf16kit.__version__, "process.pid": os.getpid()})
    if str(found.attributes["service.name"]).startswith("unknown_service"):
        found = found.merge(Resource({"service.name": "bf16kit"}))
    return found
