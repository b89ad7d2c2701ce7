"""The supervisor's registry: describes the whole server and runs no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from bf16kit.messages.errors import NotFound, Unavailable
from bf16kit.messages.wording import quoted
from service.contract import Model, Slot, State, StatisticsSnapshot
from service.request import Observation
from service.workers.description import ModelDescription, SummedStatistics
from service.workers.fleet import Fleet
from service.workers.view import SlotState

Summed = Callable[[str, int], StatisticsSnapshot]


@dataclass(frozen=True, slots=True)
class OverviewSlot:
    """A :class:`service.contract.Slot` of the whole server."""

    name: str
    version: int
    state: State
    reason: str
    model: Model | None

    def observe(self, seen: Observation) -> None:
        """Do nothing: the workers count."""


class Overview:
    """A :class:`service.contract.Registry` of the whole server. No model can be acquired: none runs here."""

    def __init__(self, fleet: Fleet, summed: Summed = lambda name, version: StatisticsSnapshot()) -> None:
        self._fleet = fleet
        self._summed = summed

    @property
    def live(self) -> bool:
        return True

    @property
    def ready(self) -> bool:
        return self._fleet.view.ready

    def acquire(self, name: str, version: str) -> NoReturn:
        raise Unavailable("models run in the workers, not here")

    def get(self, name: str, version: str) -> Model:
        slot = self.find(name, version)
        if slot.model is None:
            raise Unavailable(f"model {slot.name!r} version {slot.version} is {slot.state}")
        return slot.model

    def find(self, name: str, version: str) -> Slot:
        for slot in reversed(self.models()):
            if slot.name == name and version in ("", str(slot.version)):
                return slot
        raise NotFound(f"unknown model {quoted(name)}")

    def is_ready(self, name: str, version: str) -> bool:
        return any(s.name == name and version in ("", str(s.version)) and s.state == "ready" for s in self.models())

    def models(self) -> Sequence[Slot]:
        return [self._slot(slot) for slot in self._fleet.view.slots.values()]

    def versions(self, name: str) -> list[int]:
        return [slot.version for slot in self.models() if slot.name == name and slot.state == "ready"]

    def subscribe(self, callback: Callable[[], None]) -> None:
        self._fleet.subscribe(callback)

    def _slot(self, slot: SlotState) -> OverviewSlot:
        model: Model | None = None
        if slot.model is not None:
            statistics = SummedStatistics(lambda: self._summed(slot.name, slot.version))
            model = ModelDescription(slot.name, slot.version, slot.model, statistics)
        return OverviewSlot(slot.name, slot.version, slot.state, slot.reason, model)
