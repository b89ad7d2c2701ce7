"""The contract between the transport (gRPC) and the core (models, batching, metrics). It imports neither.

Both raise the errors of :mod:`bf16kit.messages.errors`; ``bf16kit.service.grpc.status`` maps them to gRPC codes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from queue import SimpleQueue
from typing import Any, Literal, Protocol

from bf16kit.numerics.tensors import BY_NAME, TensorSpec
from bf16kit.numerics.tensors import Array as Array
from bf16kit.numerics.tensors import describe as describe_shape
from bf16kit.runtime import RuntimeInfo
from bf16kit.service.request import Done, Observation, Precision, Reply, Request

State = Literal["loading", "ready", "unavailable"]
PHASES = ("compute_input", "compute_infer", "compute_output")  # of one batch
DURATIONS = ("success", "fail", "queue", *PHASES)  # of Triton's statistics
GATE_FAILED = "FAILED"


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits on one request to a model, in addition to the limit on its message's size.

    ``dims`` has the largest sizes of free dimensions, by name; ``response_bytes`` limits the outputs of one response.
    """

    dims: Mapping[str, int] = field(default_factory=dict)
    response_bytes: int = 256 << 20


@dataclass(frozen=True, slots=True)
class TensorSemantics:
    """The meaning of a model's tensors, by name: the class labels of outputs, the first for index 0."""

    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """Limits of a queue: the number of waiting requests, and the expected wait of one request in seconds."""

    max_requests: int = 128
    max_wait_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Scheduling:
    """The queue limits of a model and the versions of it to serve, as ``serving.yaml`` declares them.

    ``versions`` is the number of newest versions to serve, or a tuple of versions, or None for all.
    """

    bounds: QueueBounds = QueueBounds()
    versions: int | tuple[int, ...] | None = 1


@dataclass(frozen=True, slots=True)
class ActivePrecision:
    """The precision that answers now, and why, as text for operators.

    ``reason`` says why fp32 answers, or what is wrong with bf16 while it still answers; it is empty otherwise.
    """

    precision: Precision = "bf16"
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Duration:
    """The number of times that something happened, and the total time that it took in nanoseconds."""

    count: int = 0
    ns: int = 0

    def __add__(self, other: Duration) -> Duration:
        return Duration(self.count + other.count, self.ns + other.ns)


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """Executions of one batch size in rows. Above 128, one entry has all sizes over half of ``batch_size`` up to it."""

    batch_size: int
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration

    def __add__(self, other: BatchStatistics) -> BatchStatistics:
        return BatchStatistics(self.batch_size, *(getattr(self, name) + getattr(other, name) for name in PHASES))


@dataclass(frozen=True, slots=True)
class StatisticsSnapshot:
    """A consistent snapshot of Triton's ``ModelStatistics``, without the names."""

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

    def __add__(self, other: StatisticsSnapshot) -> StatisticsSnapshot:
        """Return the sum of two processes' statistics of a version, which share its weights."""
        batches = {each.batch_size: each for each in self.batches}
        for each in other.batches:
            same_size = batches.get(each.batch_size)
            batches[each.batch_size] = each if same_size is None else same_size + each
        return StatisticsSnapshot(
            last_inference_ms=max(self.last_inference_ms, other.last_inference_ms),
            inference_count=self.inference_count + other.inference_count,
            execution_count=self.execution_count + other.execution_count,
            batches=tuple(batches[size] for size in sorted(batches)),
            weight_bytes=max(self.weight_bytes, other.weight_bytes),
            **{name: getattr(self, name) + getattr(other, name) for name in DURATIONS},
        )


class Model(Protocol):
    """One loaded generation of one version of a model. Only its statistics and the precision that answers change."""

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

    @property
    def max_queue_delay_s(self) -> float: ...
    @property
    def instances(self) -> int: ...
    @property
    def bounds(self) -> Bounds: ...
    @property
    def semantics(self) -> TensorSemantics: ...
    @property
    def scheduling(self) -> Scheduling: ...
    @property
    def info(self) -> RuntimeInfo: ...
    @property
    def active_precision(self) -> ActivePrecision: ...
    @property
    def golden(self) -> str:
        """The newest result of the golden samples, for operators.

        It begins with :data:`GATE_FAILED` if the drift was over budget or they could not be run.
        """

    @property
    def budget(self) -> Mapping[str, float]:
        """The drift budget in force, by metric name: :meth:`bf16kit.drift.budget.Budget.as_dict`."""

    @property
    def statistics(self) -> StatisticsSnapshot: ...

    def begin(self, request: Request, done: Done) -> None:
        """Queue one request. ``done`` gets its reply or its error, once.

        The error is a :class:`RequestError` (its text is for the client) or a :class:`RuntimeFailure` (for the log). It
        is raised instead if the request cannot be queued.
        """

    def release(self) -> None:
        """Give back what :meth:`Registry.acquire` has returned: the model may be unloaded now."""

    def observe(self, observation: Observation) -> None:
        """Count a request to this model, whether or not it reached :meth:`begin`."""


def infer(model: Model, request: Request) -> Reply:
    """Run one request; block the calling thread until it is over. Raises what :meth:`Model.begin` reports."""
    results: SimpleQueue[Reply | Exception] = SimpleQueue()
    model.begin(request, results.put)
    result = results.get()
    if isinstance(result, Exception):
        raise result
    return result


def describe(model: Model) -> dict[str, Any]:
    """Return how a model runs, as JSON: the fields of its RuntimeInfo, and its configuration."""

    def written(spec: TensorSpec) -> str:
        return f"{spec.name}: {BY_NAME[spec.dtype].oip} {describe_shape(spec.shape)}"

    return {
        **asdict(model.info),
        "golden": model.golden,
        "weight_bytes": model.statistics.weight_bytes,
        "max_batch_size": model.max_batch_size,
        "max_queue_delay_seconds": model.max_queue_delay_s,
        "instances": model.instances,
        "inputs": [written(spec) for spec in model.inputs],
        "outputs": [written(spec) for spec in model.outputs],
        "budget": dict(model.budget),
        "active_precision": model.active_precision.precision,
        "active_precision_reason": model.active_precision.reason,
    }


class SlotView(Protocol):
    """What every process of a server can tell of a :class:`Slot`."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def state(self) -> State: ...
    @property
    def reason(self) -> str:
        """Why nothing answers here, as text for operators; for a ready slot, why its replacement failed; else empty."""

    @property
    def running(self) -> Mapping[str, Any] | None:
        """What :func:`describe` tells of its generation; None without one."""


class Slot(SlotView, Protocol):
    """The place of one version of one model. Its generation may be replaced, and there may be none."""

    @property
    def model(self) -> Model | None:
        """The generation that answers, or None. For inspection only: it may be unloaded at any time."""

    def observe(self, observation: Observation) -> None:
        """Count a request for this version that reached no generation."""


class Overview(Protocol):
    """What every process of a server can tell of its models."""

    @property
    def ready(self) -> bool:
        """Whether all models that the server started with are ready, one at least, and it is not draining.

        A server may need none. Models added to a ready server do not change this.
        """

    def find(self, name: str, version: str) -> SlotView:
        """Return a slot in any state. ``version`` is text; ``""`` selects the newest. Raises NotFound."""

    def models(self) -> Sequence[SlotView]:
        """Return the slots of all versions, sorted by name and then by version."""


class Registry(Overview, Protocol):
    """The models of this server. ``version`` is the text from the request; ``""`` selects the newest ready version."""

    def acquire(self, name: str, version: str) -> Model:
        """Return a ready model, which stays loaded until :meth:`Model.release`: call that once a response is encoded.

        Raises NotFound, Unavailable (loading, draining) or InvalidRequest (the version is no integer).
        """

    def get(self, name: str, version: str) -> Model:
        """Return a ready model without a lease: for inspection, not for inference. Raises as :meth:`acquire` does."""

    def find(self, name: str, version: str) -> Slot:
        """Return a slot in any state. Raises NotFound or InvalidRequest."""

    def is_ready(self, name: str, version: str) -> bool:
        """Return whether :meth:`get` would return a model; False for an unknown one. Raises InvalidRequest as well."""

    def models(self) -> Sequence[Slot]: ...

    def versions(self, name: str) -> list[int]:
        """Return the ready versions of a model, ascending."""

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called, on any thread, after every change of a state; it must not block."""
