"""Finds the model whose reference kills the process with the references, so that it stays off.

Each death is counted against the references that were active, that is being loaded or run, at that moment. After a
first death, with possibly several active references, only one may be active at a time. A reference that was the only
active one at a death, and was also active at the one before, stays off.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from service.shadow.activity import Activity, ActivityTracker, Key, label_of, new_tracker_memory

DEATHS = 2  # in a row
FORGIVEN_SECONDS = 3600.0  # a process that ran this long ends a row of deaths
_ACTIVITY_TEXTS: Mapping[Activity, str] = {"loading": "being loaded", "running": "running"}


class Culprit(NamedTuple):
    """A reference that stays off."""

    key: Key
    reason: str  # shown to users


class CrashTracker:
    """Counts the starts and deaths of the process, on the thread that leads it. ``clock`` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started_at = 0.0
        self._tracker: ActivityTracker | None = None  # what the current process is doing
        self._deaths: dict[Key, int] = {}  # per reference active at the last death: its consecutive deaths

    @property
    def one_by_one(self) -> bool:
        """Whether the process may load or run only one reference at a time."""
        return bool(self._deaths)

    def process_started(self) -> int:
        """Note that a process starts.

        Return the descriptor of its tracker's memory, which the caller closes. Raises OSError.
        """
        file = new_tracker_memory()
        try:
            self._tracker, self._started_at = ActivityTracker(file), self._clock()
        except BaseException:
            os.close(file)
            raise
        return file

    def process_died(self, known: Collection[Key]) -> Culprit | None:
        """Note that the process died.

        Return the culprit, if there is one. ``known`` are all models that it was to measure.
        """
        tracker, self._tracker = self._tracker, None
        if tracker is None:
            return None
        labels = {label_of(key): key for key in known}
        active = {labels[label]: activity for label, activity in tracker.read(labels).items()}
        tracker.close()
        before = {} if self._clock() - self._started_at >= FORGIVEN_SECONDS else self._deaths
        self._deaths = {key: before.get(key, 0) + 1 for key in active}
        if len(active) != 1:
            return None
        ((key, activity),) = active.items()
        if self._deaths[key] < DEATHS:
            return None
        self._deaths = {}
        return Culprit(
            key,
            f"the process that measures died {DEATHS} times in a row while the fp32 reference of this model was"
            f" {_ACTIVITY_TEXTS[activity]}, so it stays off until the model is loaded again; other models are still"
            " measured",
        )
