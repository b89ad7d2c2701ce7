"""One request on its way: what a client wants, what it is answered, where its time went and what became of it.

The transport makes it of a message and the core answers it; this file imports neither.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, get_args

from bf16kit.tensors import Array

#: What a client is told of the precision that made its answer: the model's own, or the fp32 reference's in its place.
Precision = Literal["bf16", "fp32"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)

#: Why something was refused before any model was asked: the metrics' words, and no others. Those with ``http_`` are the
#: HTTP port's, ``unauthenticated`` and ``forbidden`` are both ports'.
REFUSALS = (
    "in_flight",  # as many requests are at work as may be
    "connection_share",  # this connection has as many of them as it may have
    "model_share",  # and this model
    "bytes",  # the messages at work are as large as they may be together
    "streams",  # as many streams are open as may be
    "watches",  # as many health watches are open as may be
    "reflection",  # as many reflection streams
    "control",  # as many calls for health and metadata
    "regions",  # as much shared memory is registered as may be
    "too_slow",  # the client kept the server waiting, in sending or in taking, for too long
    "draining",  # the server is shutting down
    "unauthenticated",  # no token, or one that is not known; no client certificate where one is needed
    "forbidden",  # a token without the scope that this needs
    "http_connections",  # a connection was closed to make room for another
    "http_busy",  # too many different pages were asked for at once
    "http_timeout",  # a request did not come within its time
    "http_malformed",  # what came was no request, too large, or of a method that this port does not answer
    "other",
)


class Cancellation:
    """The client has left: a flag that the transport raises once, and callbacks for those who wait.

    A callback runs once, on whatever thread raises the flag, or at once where it is up already; it must not block.
    """

    __slots__ = ("_callbacks", "_lock", "cancelled")

    def __init__(self) -> None:
        self.cancelled = False
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []

    def cancel(self) -> None:
        with self._lock:
            self.cancelled = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def subscribe(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if not self.cancelled:
                self._callbacks.append(callback)
                return
        callback()

    def unsubscribe(self, callback: Callable[[], None]) -> None:
        """Forget ``callback``; no matter whether it has run, or was ever known."""
        with self._lock, contextlib.suppress(ValueError):
            self._callbacks.remove(callback)


class Claim(Protocol):
    """The right to run one request at once, on the thread that holds it: for a thread that must not wait."""

    def give_back(self) -> None:
        """Nothing where a request has used it."""
        ...


@dataclass(slots=True)
class Request:
    """One client's work. ``feeds`` are already of the model's dtypes and checked against its inputs.

    ``rows`` is the size of the batch axis (1 for a model without one), ``deadline`` is in :func:`time.monotonic`
    seconds, ``outputs`` are names in the order wanted (``None`` = all of them), ``priority`` is 1 for the most urgent,
    0 for the model's default. A ``patient`` one waits for a place in a full queue, where others are refused.

    ``timings`` is stamped by whoever spends the time, whatever becomes of the request; None while it has neither waited
    nor run. ``nbytes`` are those of its message, 0 where its transport does not tell; ``claim`` is of the model that is
    asked, where it has one.
    """

    feeds: dict[str, Array]
    rows: int = 1
    outputs: tuple[str, ...] | None = None
    deadline: float | None = None
    cancellation: Cancellation | None = None
    priority: int = 0
    patient: bool = False
    timings: Timings | None = None
    nbytes: int = 0
    claim: Claim | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time of one request went, in seconds. All but ``queue`` and ``arrived`` are its batch's, whole; of one
    that ran and failed, ``compute_infer`` is all of it.

    ``arrived`` (in the queue) and ``begun`` (the batch) are :func:`time.monotonic` seconds; 0 where neither was.
    ``rows`` are those of the batch.
    """

    queue: float = 0.0
    compute_input: float = 0.0
    compute_infer: float = 0.0
    compute_output: float = 0.0
    arrived: float = 0.0
    begun: float = 0.0
    rows: int = 0

    def queued(self, arrived: float, taken: float) -> Timings:
        """Those of a request that waited from ``arrived`` until it was ``taken`` for this batch."""
        phases = self.compute_input, self.compute_infer, self.compute_output
        return Timings(taken - arrived, *phases, arrived, self.begun, self.rows)

    @property
    def compute(self) -> float:
        return self.compute_input + self.compute_infer + self.compute_output


@dataclass(slots=True)
class Reply:
    """Outputs by name, in the order asked for, and which precision made them.

    ``precision`` is :attr:`~bf16kit.runtime.RuntimeInfo.precision` of what ran the batch.
    """

    outputs: dict[str, Array]
    precision: str

    @property
    def told(self) -> Precision:
        """The same in the words of clients and metrics: what is not all fp32 is bf16."""
        return "fp32" if self.precision == "fp32" else "bf16"


class Observation(NamedTuple):
    """What became of one request: made once, when it is over; the metrics, the statistics and the log all read this.

    ``model`` and ``version`` are those that were asked, or, where there are none, what the client named. ``code`` is a
    gRPC code's name; ``seconds`` are those from the request's arrival to its encoded answer.
    """

    model: str
    version: str
    request_id: str  # the client's own
    code: str
    seconds: float
    timings: Timings | None = None  # None: it was refused before it waited or ran
    rows: int = 0  # 0: it was refused before they were counted
    trace: str = ""  # the trace that this request is part of, in hexadecimal; empty: it is not traced

    @property
    def answered(self) -> bool:
        return self.code == "OK"


class Trace(Protocol):
    """One request's part of a trace that is to be recorded."""

    @property
    def id(self) -> str:
        """In hexadecimal, as in W3C's ``traceparent``."""
        ...

    def end(self, rpc: str, seen: Observation) -> None:
        """The request is over, just now. Never blocks and never raises."""
        ...


class Tracer(Protocol):
    """Decides which requests are traced."""

    def sample(self, model: str, header: Callable[[str], str | bytes | None]) -> Trace | None:
        """The trace of a request for ``model``, whose metadata ``header`` looks up; None: it is not traced."""
        ...
