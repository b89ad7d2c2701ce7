"""What each worker reports of itself, and what that makes of the whole server: values that travel as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from service.contract import GATE_FAILED, State

_RANK: dict[State, int] = {"ready": 0, "loading": 1, "unavailable": 2}
UNLOADING = "unloading"  # the reason of what nobody wants any more
Key = tuple[str, int]  # a model's name and version


class SlotState(NamedTuple):
    """What is in the place of one version of one model. ``model`` describes what answers there, for people."""

    name: str
    version: int
    state: State
    reason: str = ""
    model: dict[str, Any] | None = None

    @property
    def key(self) -> Key:
        return self.name, self.version


@dataclass(frozen=True, slots=True)
class Report:
    """What one worker says of itself. ``listening``: clients' connections may reach it. ``ready`` is as where it alone
    serves: what is added later need not be."""

    listening: bool
    ready: bool
    slots: tuple[SlotState, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {"listening": self.listening, "ready": self.ready, "slots": [list(slot) for slot in self.slots]}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Self:
        return cls(told["listening"], told["ready"], tuple(SlotState(*slot) for slot in told["slots"]))


@dataclass(frozen=True, slots=True)
class View:
    """The whole server at one moment: ready when every worker is, and so is a version."""

    ready: bool = False
    slots: Mapping[Key, SlotState] = field(default_factory=dict)  # by name and version, ascending

    def as_json(self) -> dict[str, Any]:
        return {"ready": self.ready, "slots": [list(slot) for slot in self.slots.values()]}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Self:
        return cls(told["ready"], {slot.key: slot for slot in (SlotState(*each) for each in told["slots"])})

    @classmethod
    def of(
        cls,
        reports: Sequence[Report | None],
        wanted: Iterable[Key],
        *,
        retired: bool = False,
    ) -> Self:
        """``reports`` by worker, None of one that is being started; ``wanted`` is what all of them are to serve."""
        wanted = set(wanted)
        held = [{} if report is None else {slot.key: slot for slot in report.slots} for report in reports]
        keys = sorted(wanted.union(*held))
        slots = {key: _whole(key, reports, [slots.get(key) for slots in held], wanted=key in wanted) for key in keys}
        ready = all(report is not None and report.listening and report.ready for report in reports)
        return cls(ready and not retired, slots)


def _badness(slot: SlotState) -> tuple[int, bool]:
    """Of two that are ready, one that could not be replaced has something to tell."""
    return _RANK[slot.state], bool(slot.reason)


def _whole(key: Key, reports: Sequence[Report | None], held: Sequence[SlotState | None], *, wanted: bool) -> SlotState:
    """The worst of what the workers have in one place: whoever asks may come to any of them."""
    name, version = key
    worst: SlotState | None = None
    for number, (report, slot) in enumerate(zip(reports, held, strict=True), 1):
        if report is None:
            slot = SlotState(name, version, "loading", f"worker {number} is being started")
        elif slot is None:
            slot = SlotState(
                name, version, "loading" if wanted else "unavailable", "loading" if wanted else "unloading"
            )
        elif slot.reason:
            slot = slot._replace(reason=f"worker {number}: {slot.reason}")
        if worst is None or _badness(slot) > _badness(worst):
            worst = slot
    models = [slot.model for slot in held if slot is not None and slot.model is not None]
    # Of models that are alike, the one to worry about: its golden gate was not passed.
    failed = (model for model in models if model.get("golden", "").startswith(GATE_FAILED))
    described = next(failed, next(iter(models), None))
    assert worst is not None  # noqa: S101 -- there is always a worker
    return worst._replace(model=described)
