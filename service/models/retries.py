"""Decides when to try again to load a model whose files have not changed.

A full disk, a lack of memory, a busy device, a file system that does not answer: such causes pass, and nothing in the
repository shows it. The cause cannot always be told from the failure. So every failed load is tried again, with growing
pauses, except what ``serving.yaml`` rules out, and loads that were given up, whose threads cannot be ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from service.contract import State
from service.models.loads import GIVEN_UP
from service.models.plan import DesiredModel

FIRST_SECONDS = 30.0  # from the poll that finds a model not loaded to the first retry
LONGEST_SECONDS = 3600.0  # longest pause between two retries


class SlotLike(Protocol):
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
class _RetryState:
    desired: DesiredModel
    due: float
    pause: float


class Retries:
    """The retries of the models in ``slots``. For one thread, which calls it at every poll.

    ``clock`` returns seconds.
    """

    def __init__(self, slots: Callable[[], Iterable[SlotLike]], clock: Callable[[], float] = time.monotonic) -> None:
        self._slots = slots
        self._clock = clock
        self._states: dict[str, _RetryState] = {}

    def due(self, desired_models: Mapping[str, DesiredModel]) -> list[DesiredModel]:
        """Return the ``desired_models`` to try again now. One that has changed starts again with the first pause."""
        now = self._clock()
        served = {(slot.name, slot.version): slot for slot in self._slots()}
        states = self._states
        self._states = {}
        due = []
        for name, desired in desired_models.items():
            slots = [served.get((name, plan.version)) for plan in desired.plans]
            if all(slot is not None and _serves_as_desired(slot) for slot in slots):
                continue
            if any(plan.broken for plan in desired.plans) or any(slot and GIVEN_UP in slot.reason for slot in slots):
                continue
            retry = states.get(name)
            if retry is None or retry.desired != desired:
                retry = _RetryState(desired, now + FIRST_SECONDS, FIRST_SECONDS)
            elif now >= retry.due and not any(slot is not None and slot.state == "loading" for slot in slots):
                retry.pause = min(2 * retry.pause, LONGEST_SECONDS)
                retry.due = now + retry.pause
                due.append(desired)
            self._states[name] = retry
        return due


def _serves_as_desired(slot: SlotLike) -> bool:
    """Return whether the slot serves what is wanted: a reason beside a ready model says that its replacement failed."""
    return slot.state == "ready" and not slot.reason
