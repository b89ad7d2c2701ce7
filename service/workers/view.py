"""The workers' reports and the view of the whole server that follows from them: values sent as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
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


@dataclass(frozen=True)
class Report:
    """One worker's report on itself.

    ``listening``: clients' connections may reach it. ``ready`` means the same as for a server of one process, so models
    added later need not be ready.
    """

    listening: bool
    ready: bool
    slots: tuple[SlotState, ...] = ()

    @cached_property
    def slots_by_key(self) -> Mapping[Key, SlotState]:
        return {slot.key: slot for slot in self.slots}

    def as_json(self) -> dict[str, Any]:
        return {"listening": self.listening, "ready": self.ready, "slots": [list(slot) for slot in self.slots]}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        return cls(fields["listening"], fields["ready"], tuple(SlotState(*slot) for slot in fields["slots"]))


@dataclass(frozen=True, slots=True)
class View:
    """The whole server at one moment.

    It becomes ready once every worker listens and is ready: before that, it would get the traffic of a whole server
    with a part of its capacity. From then on it, and each version, is ready if it is in every worker that listens:
    clients cannot reach another one, because a restarted worker listens only once its models are loaded. If none
    listens any more, everything begins anew.
    """

    ready: bool = False
    slots: Mapping[Key, SlotState] = field(default_factory=dict)  # by name and version, ascending
    complete: bool = False  # every worker has been ready at once, and some have listened ever since

    def as_json(self) -> dict[str, Any]:
        slots = [list(slot) for slot in self.slots.values()]
        return {"ready": self.ready, "slots": slots, "complete": self.complete}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        slots = (SlotState(*each) for each in fields["slots"])
        return cls(fields["ready"], {slot.key: slot for slot in slots}, fields["complete"])

    @classmethod
    def of(
        cls,
        reports: Sequence[Report | None],
        wanted: Iterable[Key],
        *,
        retired: bool = False,
        was_complete: bool = False,
    ) -> Self:
        """Build the view.

        ``reports`` are by worker, None for one that is starting. ``wanted`` is what all are to serve. ``was_complete``
        is what :attr:`complete` was before.
        """
        wanted, workers = set(wanted), dict(enumerate(reports, 1))
        listening = {number: report for number, report in workers.items() if report is not None and report.listening}
        ready = bool(listening) and all(report.ready for report in listening.values())
        complete = bool(listening) and (was_complete or (ready and len(listening) == len(workers)))
        if complete:
            workers = dict(listening)
        keys = sorted(wanted.union(*(report.slots_by_key for report in workers.values() if report is not None)))
        slots = {key: _worst(key, workers, wanted=key in wanted) for key in keys}
        return cls(ready and complete and not retired, slots, complete)


def _badness(slot: SlotState) -> tuple[int, bool]:
    """Return a sort key. Of two ready slots, one with a reason is worse: it could not be replaced."""
    return _RANK[slot.state], bool(slot.reason)


def _worst(key: Key, workers: Mapping[int, Report | None], *, wanted: bool) -> SlotState:
    """Return the worst of the workers' states of a version, because a client may reach any of them."""
    worst = max((_state(key, number, report, wanted=wanted) for number, report in workers.items()), key=_badness)
    slots = [slot for report in workers.values() if report is not None and (slot := report.slots_by_key.get(key))]
    models = [slot.model for slot in slots if slot.model is not None]
    # Of equal models, describe one whose golden gate did not pass.
    failed = (model for model in models if model.get("golden", "").startswith(GATE_FAILED))
    return worst._replace(model=next(failed, next(iter(models), None)))


def _state(key: Key, number: int, report: Report | None, *, wanted: bool) -> SlotState:
    if report is None:
        return SlotState(*key, "loading", f"worker {number} is being started")
    slot = report.slots_by_key.get(key)
    if slot is None:
        return SlotState(*key, "loading", "loading") if wanted else SlotState(*key, "unavailable", UNLOADING)
    if not slot.reason or slot.reason.startswith("worker "):  # it was another worker that could not load it
        return slot
    return slot._replace(reason=f"worker {number}: {slot.reason}")
