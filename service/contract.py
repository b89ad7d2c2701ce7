"""The contract between the transport (gRPC) and the core (models, batching, metrics), importing neither.

The transport turns wire messages into :class:`Request` and :class:`Reply` into wire messages. The core owns everything
between. Errors cross as :mod:`bf16kit.errors`; ``service.transport.status`` maps them to gRPC codes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from bf16kit.runtime import RuntimeInfo
from bf16kit.tensors import Array as Array
from bf16kit.tensors import TensorSpec

State = Literal["loading", "ready", "unavailable"]

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


@dataclass(slots=True)
class Request:
    """One client's work. ``feeds`` are already of the model's dtypes and checked against its inputs.

    ``rows`` is the size of the batch axis (1 for a model without one), ``deadline`` is in :func:`time.monotonic`
    seconds, ``outputs`` are names in the order wanted (``None`` = all of them), ``priority`` is 1 for the most urgent,
    0 for the model's default. A ``patient`` one waits for a place in a full queue, where others are refused.

    ``timings`` is stamped by whoever spends the time, whatever becomes of the request; None while it has neither waited
    nor run.
    """

    feeds: dict[str, Array]
    rows: int = 1
    outputs: tuple[str, ...] | None = None
    deadline: float | None = None
    cancellation: Cancellation | None = None
    priority: int = 0
    patient: bool = False
    timings: Timings | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time of one request went, in seconds. The last three are those of its batch, whole; of one that ran
    and failed, ``compute_infer`` is all of it."""

    queue: float = 0.0
    compute_input: float = 0.0
    compute_infer: float = 0.0
    compute_output: float = 0.0

    def queued(self, seconds: float) -> Timings:
        """The same with this queue time."""
        return Timings(seconds, self.compute_input, self.compute_infer, self.compute_output)

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

    @property
    def answered(self) -> bool:
        return self.code == "OK"


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one request may ask of a model, beyond its message's own size.

    ``dims`` bounds free dimensions by their names; ``response_bytes`` the outputs of one answer.
    """

    dims: Mapping[str, int] = field(default_factory=dict)
    response_bytes: int = 256 << 20


@dataclass(frozen=True, slots=True)
class Duration:
    """How often something happened and how long it took in all."""

    count: int = 0
    ns: int = 0


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """Executions of one batch size (rows), or of those over 128 up to it and over half of it."""

    batch_size: int
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


@dataclass(frozen=True, slots=True)
class StatisticsSnapshot:
    """Triton's ``ModelStatistics``, without the names: one consistent view."""

    last_inference_ms: int = 0  # since the epoch; 0 = never
    inference_count: int = 0  # rows
    execution_count: int = 0  # batches
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    batches: tuple[BatchStatistics, ...] = ()
    weight_bytes: int = 0  # of the artifact's stored weights, for memory_usage


class Statistics(Protocol):
    """What the core counts per model version."""

    def snapshot(self) -> StatisticsSnapshot: ...


class Model(Protocol):
    """One loaded generation of one version of a model: nothing but its statistics changes while it lives."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...
    @property
    def outputs(self) -> tuple[TensorSpec, ...]: ...
    @property
    def batch_axis(self) -> int | None: ...
    @property
    def max_batch_size(self) -> int:
        """Rows; 0 = the model has no batch axis, or batching is off."""
        ...

    @property
    def max_queue_delay_s(self) -> float: ...
    @property
    def instances(self) -> int: ...
    @property
    def bounds(self) -> Bounds: ...
    @property
    def info(self) -> RuntimeInfo: ...
    @property
    def statistics(self) -> Statistics: ...

    def infer(self, request: Request) -> Reply:
        """Run one request; blocks the calling thread until its batch has run.

        Raises :class:`~bf16kit.errors.RequestError` (refused: the text is for the caller) or
        :class:`~bf16kit.errors.RuntimeFailure` (failed: the text is for the log).
        """
        ...

    def observe(self, seen: Observation) -> None:
        """Count a request that this model was asked, whether or not it came to :meth:`infer`."""
        ...


class Slot(Protocol):
    """The place of one version of one model, whatever is in it: its generation may be replaced, or be none."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def state(self) -> State: ...
    @property
    def reason(self) -> str:
        """Why nothing answers here, for people; empty when the slot is ready."""
        ...

    @property
    def model(self) -> Model | None:
        """The generation that answers; None where none does. It may be unloaded at any time: it is for looking at."""
        ...

    def observe(self, seen: Observation) -> None:
        """Count a request for this version, which no generation of it was asked."""
        ...


class Registry(Protocol):
    """The models of this server. ``version`` is as it came from the wire: ``""`` asks for the newest ready one."""

    @property
    def live(self) -> bool: ...
    @property
    def ready(self) -> bool:
        """At least one model, all of them ready, and not draining."""
        ...

    def acquire(self, name: str, version: str) -> AbstractContextManager[Model]:
        """A ready model, which is not unloaded before the context is left: once its answer is encoded.

        Raises NotFound, Unavailable (loading, draining) or InvalidRequest (the version is no integer).
        """
        ...

    def get(self, name: str, version: str) -> Model:
        """The same without a lease: for looking at, not for inference."""
        ...

    def find(self, name: str, version: str) -> Slot:
        """A slot in whatever state. Raises NotFound or InvalidRequest."""
        ...

    def is_ready(self, name: str, version: str) -> bool:
        """Whether :meth:`get` would give a model; False for what is not known. Raises InvalidRequest like it."""
        ...

    def models(self) -> Sequence[Slot]:
        """Every version, by name and then by version."""
        ...

    def versions(self, name: str) -> list[int]:
        """The versions that are ready, ascending."""
        ...

    def subscribe(self, callback: Callable[[], None]) -> None:
        """``callback`` runs, on any thread, after every change of a state; it must not block."""
        ...
