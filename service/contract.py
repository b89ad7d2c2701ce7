"""The contract between the transport (gRPC) and the core (models, batching, metrics), importing neither.

The transport turns wire messages into :class:`Request` and :class:`Reply` into wire messages. The core owns everything
between. Errors cross as :mod:`bf16kit.errors`; ``service.transport.status`` maps them to gRPC codes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from bf16kit.runtime import RuntimeInfo
from bf16kit.tensors import Array as Array
from bf16kit.tensors import TensorSpec

State = Literal["loading", "ready", "unavailable"]


class Cancellation:
    """A flag that the transport raises when the caller has left; setting and reading are atomic."""

    __slots__ = ("cancelled",)

    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass(slots=True)
class Request:
    """One caller's work. ``feeds`` are already of the model's dtypes and checked against its inputs.

    ``rows`` is the size of the batch axis (1 for a model without one), ``deadline`` is in :func:`time.monotonic`
    seconds, ``outputs`` are names in the order wanted (``None`` = all of them).
    """

    feeds: dict[str, Array]
    rows: int = 1
    outputs: tuple[str, ...] | None = None
    deadline: float | None = None
    cancellation: Cancellation | None = None


@dataclass(slots=True)
class Reply:
    """Outputs by name, in the order asked for, and where the time went (seconds)."""

    outputs: dict[str, Array]
    queue_s: float = 0.0
    compute_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Duration:
    """How often something happened and how long it took in all."""

    count: int = 0
    ns: int = 0


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """Executions of one batch size (rows)."""

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
    """One version of one model, ready or not. ``inputs``, ``outputs`` and ``info`` are complete once it is ready."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def state(self) -> State: ...
    @property
    def reason(self) -> str:
        """Why the model is not ready, for people; empty when it is."""
        ...

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
    def info(self) -> RuntimeInfo: ...
    @property
    def statistics(self) -> Statistics: ...

    def infer(self, request: Request) -> Reply:
        """Run one request; blocks the calling thread until its batch has run.

        Raises :class:`~bf16kit.errors.RequestError` (refused: the text is for the caller) or
        :class:`~bf16kit.errors.RuntimeFailure` (failed: the text is for the log).
        """
        ...


class Registry(Protocol):
    """The models of this server. ``version`` is as it came from the wire: ``""`` asks for the newest ready one."""

    @property
    def live(self) -> bool: ...
    @property
    def ready(self) -> bool:
        """At least one model, all of them ready, and not draining."""
        ...

    def get(self, name: str, version: str) -> Model:
        """A ready model. Raises NotFound, Unavailable (loading, draining) or InvalidRequest (version no integer)."""
        ...

    def find(self, name: str, version: str) -> Model:
        """A model in whatever state (for its metadata and statistics). Raises NotFound or InvalidRequest."""
        ...

    def is_ready(self, name: str, version: str) -> bool:
        """Whether :meth:`get` would give a model; False for what is not known. Raises InvalidRequest like it."""
        ...

    def models(self) -> Sequence[Model]:
        """Every version, by name and then by version."""
        ...

    def versions(self, name: str) -> list[int]: ...

    def subscribe(self, callback: Callable[[], None]) -> None:
        """``callback`` runs, on any thread, after every change of a state; it must not block."""
        ...


class RequestObserver(Protocol):
    """What the transport tells the metrics, once per request and in ``finally``."""

    def request(self, model: str, version: int, code: str, seconds: float) -> None:
        """``code`` is a gRPC code's name, e.g. ``OK``. Never called for a model that does not exist."""
        ...
