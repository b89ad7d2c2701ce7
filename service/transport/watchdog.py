"""Ends calls that keep the server waiting for too long: for a message, or for a client to read its response.

A thread that waits inside gRPC cannot be interrupted, but its call can be cancelled. gRPC then wakes the thread, and
the client sees CANCELLED.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

from service.process.ticking import Ticking

_TICK_S = 0.1
_LEAST_S = 1.0  # least time for a client while the server stops
_log = logging.getLogger(__name__)


class Patience:
    """The calls that keep the server waiting for one kind of event, and their timeout.

    It is ``seconds``, or ``hurried`` seconds while ``crowded`` returns True. At most ``slow`` calls may take longer
    than ``hurried`` at any time.
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
        self._stops: tuple[float, float] | None = None  # begin and latest end of the stop
        self._waiting: dict[object, tuple[float, Callable[[], None]]] = {}  # oldest first

    def begin(self, call: object, end: Callable[[], None]) -> None:
        """Start the timeout of ``call``. ``end`` is called if it expires."""
        self._waiting[call] = (self._clock(), end)

    def done(self, call: object) -> None:
        """Stop the timeout of ``call``, if it has one."""
        self._waiting.pop(call, None)

    def stop(self, grace: float) -> None:
        """Shorten timeouts, because the server stops within ``grace`` seconds.

        A call then gets half of the remaining time, but at least a second. Calls that only wait for their clients thus
        end before the time is up.
        """
        now = self._clock()
        self._stops = now, now + grace

    def end_overdue(self) -> int:
        """End the calls that are overdue, and return their number. Single operations on a dict need no lock."""
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
    """One thread that checks all patiences ten times a second."""

    def __init__(self, patiences: Sequence[Patience]) -> None:
        super().__init__("grpc-watchdog", _TICK_S, self._look)
        self._patiences = patiences

    def _look(self) -> None:
        for patience in self._patiences:
            try:
                patience.end_overdue()
            except Exception:  # noqa: BLE001 -- the other patiences are looked after all the same
                _log.exception("an overdue call cannot be ended")
