"""Ends calls that keep the server waiting: for their request, for their next message, or for taking their response.

A thread that waits inside gRPC cannot be told to stop waiting. What can be done is to cancel the call: gRPC then wakes
the thread, and the client sees CANCELLED.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

from service.process.ticking import Ticking

_TICK_S = 0.1
_LEAST_S = 1.0  # that a client has while the server stops
_log = logging.getLogger(__name__)


class Patience:
    """The calls that keep the server waiting in one respect, and how long they may: ``seconds``, or ``hurried`` seconds
    while it is ``crowded``. Of those that take longer than ``hurried`` at any time, at most ``slow`` may go on.
    """

    def __init__(
        self,
        seconds: float,
        hurried: float,
        crowded: Callable[[], bool] = lambda: False,
        *,
        slow: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds = seconds
        self._hurried = min(hurried, seconds)
        self._crowded = crowded
        self._slow = slow
        self._clock = clock
        self._stops: tuple[float, float] | None = None  # since when, and until when at most
        self._waiting: dict[object, tuple[float, Callable[[], None]]] = {}  # oldest first

    def begin(self, call: object, end: Callable[[], None]) -> None:
        """``call`` keeps the server waiting from now on; ``end`` is what happens when that is for too long."""
        self._waiting[call] = (self._clock(), end)

    def done(self, call: object) -> None:
        """``call`` keeps nobody waiting (any more)."""
        self._waiting.pop(call, None)

    def stop(self, grace: float) -> None:
        """The server stops within ``grace`` seconds. From now on a call may keep it waiting for half of what is left of
        that, at least for a second: then what waits only for clients ends before the time is up."""
        now = self._clock()
        self._stops = now, now + grace

    def end_overdue(self) -> int:
        """End what is overdue; returns how many that were. Single operations on a dict need no lock."""
        now, ended, slow = self._clock(), 0, 0
        limit = self._hurried if self._crowded() else self._seconds
        for call, (since, end) in self._waiting.copy().items():
            age = now - since
            slow += age > self._hurried
            over = (
                age > limit
                or now > self._end_when_stopping(since)
                or (self._slow is not None and age > self._hurried and slow > self._slow)
            )
            if over and self._waiting.pop(call, None) is not None:
                end()
                ended += 1
        return ended

    def _end_when_stopping(self, since: float) -> float:
        if self._stops is None:
            return math.inf
        begun, until = self._stops
        since = max(since, begun)
        return since + max(_LEAST_S, (until - since) / 2)


class Watchdog(Ticking):
    """One thread that looks after all patiences, ten times a second."""

    def __init__(self, patiences: Sequence[Patience]) -> None:
        super().__init__("grpc-watchdog", _TICK_S, self._look)
        self._patiences = patiences

    def _look(self) -> None:
        for patience in self._patiences:
            try:
                patience.end_overdue()
            except Exception:  # noqa: BLE001 -- the other patiences are looked after all the same
                _log.exception("a call that is overdue cannot be ended")
