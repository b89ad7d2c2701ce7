"""Decides when to try again to load a model whose files have not changed.

A full disk, a lack of memory, a busy device, a file system that does not answer: such causes pass, and nothing in the
repository shows it. The cause cannot always be told from the failure. So every failed load is tried again, with growing
pauses, except what ``serving.yaml`` rules out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from service.contract import State
from service.models.plan import DesiredModel

FIRST_SECONDS = 30.0  # from the poll that finds a model not loaded to the first retry
LONGEST_SECONDS = 3600.0  # longest pause between two retries


class Place(Protocol):
    """The part of :class:`service.contract.Slot` that is needed here."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def state(self) -> State: ...
    @property
    def reason(self) -> str: ...


@dataclass(slots=True)
class _Tries:
    desired: DesiredModel
    due: float
    pause: float


class Retries:
    """The retries of the models in ``places``. For one thread, which calls it at every poll.

    ``clock`` returns seconds.
    """

    def __init__(self, places: Callable[[], Iterable[Place]], clock: Callable[[], float] = time.monotonic) -> None:
        self._places = places
        self._clock = clock
        self._tries: dict[str, _Tries] = {}

    def due(self, desired_models: Mapping[str, DesiredModel]) -> list[DesiredModel]:
        """Return the ``desired_models`` to try again now. One that has changed starts again with the first pause."""
        now = self._clock()
        served = {(place.name, place.version): place for place in self._places()}
        tries = self._tries
        self._tries = {}
        due = []
        for name, desired in desired_models.items():
            places = [served.get((name, plan.version)) for plan in desired.plans]
            if all(place is not None and _as_wanted(place) for place in places):
                continue
            if any(plan.broken for plan in desired.plans):
                continue
            known = tries.get(name)
            if known is None or known.desired != desired:
                known = _Tries(desired, now + FIRST_SECONDS, FIRST_SECONDS)
            elif now >= known.due and not any(place is not None and place.state == "loading" for place in places):
                known.pause = min(2 * known.pause, LONGEST_SECONDS)
                known.due = now + known.pause
                due.append(desired)
            self._tries[name] = known
        return due


def _as_wanted(place: Place) -> bool:
    """Return whether the slot serves what is wanted: a reason beside a ready model says that its replacement failed."""
    return place.state == "ready" and not place.reason
