"""A worker's model as seen by the supervisor: it has all of the description, and cannot run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from bf16kit.errors import Unavailable
from bf16kit.runtime import RuntimeInfo
from bf16kit.tensors import TensorSpec
from service.contract import Answering, Bounds, Meaning, Model, QueueBounds, Scheduling, StatisticsSnapshot
from service.request import Observation, Request


def describe(model: Model) -> dict[str, Any]:
    """Return the JSON from which :class:`Described` is built."""
    return {
        "inputs": [asdict(spec) for spec in model.inputs],
        "outputs": [asdict(spec) for spec in model.outputs],
        "batch_axis": model.batch_axis,
        "max_batch_size": model.max_batch_size,
        "max_queue_delay_s": model.max_queue_delay_s,
        "instances": model.instances,
        "formats": dict(model.meaning.formats),  # labels are only needed for responses, and there are many
        "bounds": {"dims": dict(model.bounds.dims), "response_bytes": model.bounds.response_bytes},
        "info": asdict(model.info),
        "scheduling": asdict(model.scheduling),
        "meaning": asdict(model.meaning),
        "golden": model.golden,
        "answering": asdict(model.answering),
        "budget": dict(model.budget),
    }


@dataclass(frozen=True, slots=True)
class SummedStatistics:
    """A :class:`service.contract.Statistics` of all workers."""

    snapshot: Callable[[], StatisticsSnapshot]


class Described:
    """A :class:`service.contract.Model` that cannot run."""

    def __init__(self, name: str, version: int, told: Mapping[str, Any], statistics: SummedStatistics) -> None:
        self.name = name
        self.version = version
        self.inputs, self.outputs = _specs(told["inputs"]), _specs(told["outputs"])
        self.batch_axis: int | None = told["batch_axis"]
        self.max_batch_size: int = told["max_batch_size"]
        self.max_queue_delay_s: float = told["max_queue_delay_s"]
        self.instances: int = told["instances"]
        self.bounds = Bounds(**told["bounds"])
        self.meaning = Meaning(formats=told["formats"])
        self.info = RuntimeInfo(**told["info"])
        self.scheduling = _scheduling(told["scheduling"])
        self.meaning = Meaning(**told["meaning"])
        self.golden: str = told["golden"]
        self.answering = Answering(**told["answering"])
        self.budget: Mapping[str, float] = told["budget"]
        self.statistics = statistics

    def infer(self, request: Request) -> NoReturn:
        raise Unavailable("models run in the workers, not here")

    def claim(self, nbytes: int) -> None:
        """Return None: nothing runs here."""

    def observe(self, seen: Observation) -> None:
        """Do nothing: the workers count."""


def _specs(told: list[dict[str, Any]]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(**{**spec, "shape": tuple(spec["shape"])}) for spec in told)


def _scheduling(told: Mapping[str, Any]) -> Scheduling:
    versions = told["versions"]
    return Scheduling(
        QueueBounds(**told["bounds"]),
        told["priority_levels"],
        told["default_level"],
        {int(level): QueueBounds(**bounds) for level, bounds in told["by_level"].items()},
        tuple(versions) if isinstance(versions, list) else versions,
    )
