"""One request: its inputs, its reply, where its time went, and how it ended.

The transport makes it from a message and the core answers it; this file imports neither.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias, get_args

from bf16kit.numerics.tensors import Array

#: The precision of a response, as clients see it: the model's own (bf16), or that of the fp32 reference in its place.
Precision = Literal["bf16", "fp32"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)

#: All reasons to reject a request before it reaches a model, under their names in the metrics. Those with ``http_`` are
#: of the HTTP port; ``unauthenticated``, ``forbidden`` and ``unknown_model`` are of both.
REFUSALS = (
    "in_flight",  # the limit on requests in flight
    "connection_share",  # the share of one connection in that limit
    "model_share",  # the share of one model in that limit
    "bytes",  # the limit on the bytes of all messages in flight
    "streams",  # the limit on open streams
    "watches",  # the limit on open health watches
    "reflection",  # the limit on open reflection streams
    "control",  # the limit on calls for health and metadata
    "regions",  # a limit on registered shared memory
    "too_slow",  # the client was too slow to send its request or to read its response
    "draining",  # the server is shutting down
    "unknown_model",  # no such model or version
    "unauthenticated",  # no token, an unknown token, or no client certificate although one is required
    "forbidden",  # the token lacks the required scope
    "http_connections",  # a connection was closed to make room for a new one
    "http_busy",  # too many different pages were requested at once
    "http_timeout",  # a request was not complete before its timeout
    "http_malformed",  # not an HTTP request, too large, or a method that is not supported
    "other",
)


class Cancellation:
    """A flag, set once when the client has left.

    Callbacks run once, on the thread that sets it, or at once if it is set already. They must not block.
    """

    __slots__ = ("_callbacks", "cancelled")

    def __init__(self) -> None:
        self.cancelled = False
        self._callbacks: dict[Callable[[], None], None] = {}  # single operations on a dict need no lock

    def cancel(self) -> None:
        self.cancelled = True
        while self._callbacks:
            try:
                callback, _ = self._callbacks.popitem()
            except KeyError:  # another thread has taken the last one
                return
            callback()

    def subscribe(self, callback: Callable[[], None]) -> None:
        self._callbacks[callback] = None
        if self.cancelled and self._callbacks.pop(callback, callback) is None:
            callback()

    def unsubscribe(self, callback: Callable[[], None]) -> None:
        """Remove ``callback``, if it is there."""
        self._callbacks.pop(callback, None)


@dataclass(slots=True)
class Request:
    """One request of a client. ``feeds`` have the model's dtypes and have been checked against its inputs.

    ``rows`` is the size of the batch axis (1 for a model without one). ``deadline`` is in :func:`time.monotonic`
    seconds. ``outputs`` names the outputs in the order wanted; ``None`` means all. A ``waits_for_room`` request
    waits for room in a full queue; others are rejected.

    ``timings`` is set by the code that spends the time, however the request ends; it is None until the request has
    waited or run. ``client`` is the connection it came by; "" if unknown.
    """

    feeds: dict[str, Array]
    rows: int = 1
    outputs: tuple[str, ...] | None = None
    deadline: float | None = None
    cancellation: Cancellation | None = None
    waits_for_room: bool = False
    timings: Timings | None = None
    client: str = ""


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time of one request went, in seconds.

    ``queue`` and ``arrived`` are the request's own; all other values are those of its whole batch. If the run failed,
    ``compute_infer`` holds all of the run. ``arrived`` (when it entered the queue) and ``batch_started`` are
    :func:`time.monotonic` seconds, 0 if that did not happen. ``rows`` is the size of the batch.
    """

    queue: float = 0.0
    compute_input: float = 0.0
    compute_infer: float = 0.0
    compute_output: float = 0.0
    arrived: float = 0.0
    batch_started: float = 0.0
    rows: int = 0

    def queued(self, arrived: float, dequeued: float) -> Timings:
        """Return the timings of a request of this batch that waited from ``arrived`` until it was ``dequeued``."""
        phases = self.compute_input, self.compute_infer, self.compute_output
        return Timings(dequeued - arrived, *phases, arrived, self.batch_started, self.rows)

    @property
    def compute(self) -> float:
        return self.compute_input + self.compute_infer + self.compute_output


@dataclass(slots=True)
class Reply:
    """Outputs by name, in the order requested, and the precision that made them.

    ``precision`` is :attr:`~bf16kit.runtime.RuntimeInfo.precision` of the runtime that ran the batch.
    """

    outputs: dict[str, Array]
    precision: str

    @property
    def reported_precision(self) -> Precision:
        """The precision as clients and metrics name it: fp32 if everything ran in fp32, else bf16."""
        return "fp32" if self.precision == "fp32" else "bf16"


# Gets the reply to a request, or its error. Called on any thread; must neither block nor raise.
Done: TypeAlias = Callable[[Reply | Exception], None]


class Observation(NamedTuple):
    """The outcome of one request, made once when it is over. The metrics, the statistics and the log read it.

    ``model`` and ``version`` name the model that was called, or what the client named if there is no such model.
    ``code`` is the name of a gRPC code. ``seconds`` runs from the request's arrival to its encoded response.
    """

    model: str
    version: str
    request_id: str  # the client's own
    code: str
    seconds: float
    timings: Timings | None = None  # None: it was rejected before it waited or ran
    rows: int = 0  # 0: it was rejected before they were counted
    trace: str = ""  # the id of the request's trace, in hexadecimal; empty: it is not traced

    @property
    def succeeded(self) -> bool:
        return self.code == "OK"


class Trace(Protocol):
    """The part of a recorded trace that belongs to one request."""

    @property
    def id(self) -> str:
        """The trace id in hexadecimal, as in W3C's ``traceparent``."""

    def end(self, rpc: str, observation: Observation) -> None:
        """Record the end of the request, with its outcome. Never blocks and never raises."""


class Tracer(Protocol):
    """Decides which requests are traced."""

    def sample(self, model: str, header: Callable[[str], str | bytes | None]) -> Trace | None:
        """Return the trace of a request for ``model``, whose metadata ``header`` looks up; None: it is not traced."""
