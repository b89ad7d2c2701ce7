"""The schedule of golden gates: runs those that are due, one model after another, at low priority."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from service.config.loops import PeriodicThread
from service.drift.shadow import lower_priority
from service.models.generation import Generation

_CHECK_SECONDS = 1.0  # how often the schedule is checked


def golden_schedule(serving: Callable[[], Iterable[Generation]], changed: Callable[[], None]) -> PeriodicThread:
    """Return the thread that runs the gates of the generations that answer. ``changed`` is called after each gate.

    A gate holds a lease, so unloading its model waits for it; it is freed when the gate is over.
    """

    def tick() -> None:
        lower_priority()
        run_due_gates(serving(), changed, time.monotonic)

    return PeriodicThread("golden-gate", _CHECK_SECONDS, tick)


def run_due_gates(
    models: Iterable[Generation], changed: Callable[[], None], clock: Callable[[], float] = time.monotonic
) -> None:
    """Run the gates that are due; ``clock`` returns :func:`time.monotonic` seconds."""
    for model in models:
        timetable = model.gate.timetable
        reason = timetable.due_reason(clock())
        if reason and model.leases.acquire():
            with model.leases.context(model):
                timetable.begin()
                timetable.end(clock(), model.gate.run(reason))
            changed()
