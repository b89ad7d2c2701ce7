"""When what could not be loaded is tried again although no file of it has changed.

A disk that was full, memory that was short, a device that was busy, a file system that did not answer: such reasons
pass, and nothing in the repository tells of it. Which of them a failure had is not always to be told from it, so all
are tried again, ever more rarely; but not what ``serving.yaml`` rules out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from service.contract import State
from service.models.plan import Wish

FIRST_SECONDS = 30.0  # from the look that finds something not loaded to the first try
LONGEST_SECONDS = 3600.0  # between two tries


class Place(Protocol):
    """Of :class:`service.contract.Slot`, what is needed here."""

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
    wish: Wish
    due: float
    pause: float


class Retries:
    """Of the models in ``places``: asked again and again, by one thread. ``clock`` gives seconds."""

    def __init__(self, places: Callable[[], Iterable[Place]], clock: Callable[[], float] = time.monotonic) -> None:
        self._places = places
        self._clock = clock
        self._tries: dict[str, _Tries] = {}

    def due(self, wishes: Mapping[str, Wish]) -> list[Wish]:
        """Those of ``wishes``, by name, that are to be tried again now. One that is asked for anew begins anew."""
        now = self._clock()
        served = {(place.name, place.version): place for place in self._places()}
        tries = self._tries
        self._tries = {}
        due = []
        for name, wish in wishes.items():
            places = [served.get((name, plan.version)) for plan in wish.plans]
            if all(place is not None and _as_wanted(place) for place in places):
                continue
            if any(plan.broken for plan in wish.plans):
                continue
            known = tries.get(name)
            if known is None or known.wish != wish:
                known = _Tries(wish, now + FIRST_SECONDS, FIRST_SECONDS)
            elif now >= known.due and not any(place is not None and place.state == "loading" for place in places):
                known.pause = min(2 * known.pause, LONGEST_SECONDS)
                known.due = now + known.pause
                due.append(wish)
            self._tries[name] = known
        return due


def _as_wanted(place: Place) -> bool:
    """What answers with a reason beside it could not be replaced."""
    return place.state == "ready" and not place.reason
