"""The workers' reports and the view of the whole server that follows from them: values sent as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from service.contract import GATE_FAILED, State

_RANK: dict[State, int] = {"ready": 0, "loading": 1, "unavailable": 2}
UNLOADING = "unloading"  # the reason of a version that is not wanted any more
Key = tuple[str, int]  # a model's name and version


class SlotState(NamedTuple):
    """The state of one version of one model. ``model`` describes the loaded model."""

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
    """One worker's report on itself.

    ``listening``: clients' connections may reach it. ``ready`` means the same as for a server of one process, so models
    added later need not be ready.
    """

    listening: bool
    ready: bool
    slots: tuple[SlotState, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {"listening": self.listening, "ready": self.ready, "slots": [list(slot) for slot in self.slots]}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        return cls(fields["listening"], fields["ready"], tuple(SlotState(*slot) for slot in fields["slots"]))


@dataclass(frozen=True, slots=True)
class View:
    """The whole server at one moment. The server, or a version, is ready once it is in every worker."""

    ready: bool = False
    slots: Mapping[Key, SlotState] = field(default_factory=dict)  # by name and version, ascending

    def as_json(self) -> dict[str, Any]:
        return {"ready": self.ready, "slots": [list(slot) for slot in self.slots.values()]}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        return cls(fields["ready"], {slot.key: slot for slot in (SlotState(*each) for each in fields["slots"])})

    @classmethod
    def of(
        cls,
        reports: Sequence[Report | None],
        wanted: Iterable[Key],
        *,
        retired: bool = False,
    ) -> Self:
        """Build the view.

        ``reports`` are by worker, None for one that is starting. ``wanted`` is what all are to serve.
        """
        wanted = set(wanted)
        reported = [{} if report is None else {slot.key: slot for slot in report.slots} for report in reports]
        keys = sorted(wanted.union(*reported))
        slots = {
            key: _worst(key, reports, [slots.get(key) for slots in reported], wanted=key in wanted) for key in keys
        }
        ready = all(report is not None and report.listening and report.ready for report in reports)
        return cls(ready and not retired, slots)


def _badness(slot: SlotState) -> tuple[int, bool]:
    """Return a sort key. Of two ready slots, one with a reason is worse: it could not be replaced."""
    return _RANK[slot.state], bool(slot.reason)


def _worst(
    key: Key, reports: Sequence[Report | None], reported: Sequence[SlotState | None], *, wanted: bool
) -> SlotState:
    """Return the worst of the workers' states of a version, because a client may reach any of them."""
    name, version = key
    worst: SlotState | None = None
    for number, (report, slot) in enumerate(zip(reports, reported, strict=True), 1):
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
    models = [slot.model for slot in reported if slot is not None and slot.model is not None]
    # Of equal models, describe one whose golden gate did not pass.
    failed = (model for model in models if model.get("golden", "").startswith(GATE_FAILED))
    described = next(failed, next(iter(models), None))
    assert worst is not None  # noqa: S101 -- there is always a worker
    return worst._replace(model=described)
