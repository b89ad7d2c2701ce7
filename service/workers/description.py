"""A worker's model as seen by the supervisor: it has all of the description, and cannot run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from bf16kit.messages.errors import Unavailable
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import RuntimeInfo
from service.contract import (
    ActivePrecision,
    Bounds,
    Model,
    QueueBounds,
    Scheduling,
    StatisticsSnapshot,
    TensorSemantics,
)
from service.request import Observation, Request


def describe(model: Model) -> dict[str, Any]:
    """Return the JSON from which :class:`ModelDescription` is built."""
    return {
        "inputs": [asdict(spec) for spec in model.inputs],
        "outputs": [asdict(spec) for spec in model.outputs],
        "batch_axis": model.batch_axis,
        "max_batch_size": model.max_batch_size,
        "max_queue_delay_s": model.max_queue_delay_s,
        "instances": model.instances,
        "bounds": {"dims": dict(model.bounds.dims), "response_bytes": model.bounds.response_bytes},
        "info": asdict(model.info),
        "scheduling": asdict(model.scheduling),
        "golden": model.golden,
        "answering": asdict(model.active_precision),
        "budget": dict(model.budget),
    }


@dataclass(frozen=True, slots=True)
class SummedStatistics:
    """A :class:`service.contract.Statistics` of all workers."""

    snapshot: Callable[[], StatisticsSnapshot]


class ModelDescription:
    """A :class:`service.contract.Model` that cannot run."""

    def __init__(self, name: str, version: int, fields: Mapping[str, Any], statistics: SummedStatistics) -> None:
        self.name = name
        self.version = version
        self.inputs, self.outputs = _specs(fields["inputs"]), _specs(fields["outputs"])
        self.batch_axis: int | None = fields["batch_axis"]
        self.max_batch_size: int = fields["max_batch_size"]
        self.max_queue_delay_s: float = fields["max_queue_delay_s"]
        self.instances: int = fields["instances"]
        self.bounds = Bounds(**fields["bounds"])
        self.semantics = TensorSemantics()  # labels are only needed for responses, and there are many
        self.info = RuntimeInfo(**fields["info"])
        self.scheduling = _scheduling(fields["scheduling"])
        self.golden: str = fields["golden"]
        self.active_precision = ActivePrecision(**fields["answering"])
        self.budget: Mapping[str, float] = fields["budget"]
        self.statistics = statistics

    def infer(self, request: Request) -> NoReturn:
        raise Unavailable("models run in the workers, not here")

    def observe(self, seen: Observation) -> None:
        """Do nothing: the workers count."""


def _specs(fields: list[dict[str, Any]]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(**{**spec, "shape": tuple(spec["shape"])}) for spec in fields)


def _scheduling(fields: Mapping[str, Any]) -> Scheduling:
    versions = fields["versions"]
    return Scheduling(QueueBounds(**fields["bounds"]), tuple(versions) if isinstance(versions, list) else versions)
