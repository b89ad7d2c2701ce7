"""The contract between the transport (gRPC) and the core (models, batching, metrics), importing neither.

The transport turns wire messages into :class:`~service.request.Request` and
:class:`~service.request.Reply` into wire messages. The core owns everything
between. Errors cross as :mod:`bf16kit.errors`; ``service.transport.status`` maps them to gRPC codes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from bf16kit.runtime import RuntimeInfo
from bf16kit.tensors import Array as Array
from bf16kit.tensors import TensorSpec
from service.request import Claim, Observation, Precision, Reply, Request

State = Literal["loading", "ready", "unavailable"]
GATE_FAILED = "FAILED"


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one request may ask of a model, beyond its message's own size.

    ``dims`` bounds free dimensions by their names; ``response_bytes`` the outputs of one answer.
    """

    dims: Mapping[str, int] = field(default_factory=dict)
    response_bytes: int = 256 << 20


@dataclass(frozen=True, slots=True)
class Meaning:
    """What the numbers of a model's tensors stand for, as its owner says, by the tensors' names.

    ``labels`` are those of an output's classes, the first for index 0; ``formats`` how inputs hold images.
    """

    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    formats: Mapping[str, Literal["NCHW", "NHWC"]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """What may wait: requests, and the seconds that one is expected to."""

    max_requests: int = 128
    max_wait_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Scheduling:
    """How a model's requests wait, and which of its versions are served, as its owner says.

    ``by_level`` has the bounds of single levels of priority, ``bounds`` those of all others. ``versions`` is how many
    of the newest are served, or which; None: all of them.
    """

    bounds: QueueBounds = QueueBounds()
    priority_levels: int = 0
    default_level: int = 1
    by_level: Mapping[int, QueueBounds] = field(default_factory=dict)
    versions: int | tuple[int, ...] | None = 1


@dataclass(frozen=True, slots=True)
class Answering:
    """Which precision answers now, and for people why it is not bf16, or that it should not be; else empty."""

    precision: Precision = "bf16"
    reason: str = ""


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
    """One loaded generation of one version of a model: nothing changes while it lives but its statistics, and which
    precision answers."""

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
    def meaning(self) -> Meaning: ...
    @property
    def scheduling(self) -> Scheduling: ...
    @property
    def info(self) -> RuntimeInfo: ...
    @property
    def answering(self) -> Answering: ...
    @property
    def golden(self) -> str:
        """How it answered the golden samples the last time, for people; begins with :data:`GATE_FAILED` where that was
        over budget, or could not be."""
        ...

    @property
    def budget(self) -> Mapping[str, float]:
        """The bounds on drift in force, by name: :meth:`bf16kit.budget.Budget.as_dict`."""
        ...

    @property
    def statistics(self) -> Statistics: ...

    def infer(self, request: Request) -> Reply:
        """Run one request; blocks the calling thread until its batch has run.

        Raises :class:`~bf16kit.errors.RequestError` (refused: the text is for the caller) or
        :class:`~bf16kit.errors.RuntimeFailure` (failed: the text is for the log).
        """
        ...

    def claim(self, nbytes: int) -> Claim | None:
        """The right to run a request now, whose message has ``nbytes``, where that is expected to take less than waking
        another thread would.

        None where it would not, or where the model is at work. Never blocks.
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
        """For people: why nothing answers here or, of a slot that is ready, why nothing newer does; else empty."""
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
        """All models ready that it was started with, one of them at least where it needs any, and not draining. What is
        added to a server that is ready does not make it less so."""
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
