"""Ends calls that keep the server waiting for too long: for a message, or for a client to read its response.

A thread that waits inside gRPC cannot be interrupted, but its call can be cancelled. gRPC then wakes the thread, and
the client sees CANCELLED.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

#: Time for slow clients once half of the server's places are taken, and while it stops. Not shorter: the delay may be
#: the server's own, with thousands of earlier calls on gRPC's one thread.
SECONDS_UNDER_PRESSURE = 3.0
TICK_SECONDS = 0.1  # how often timeouts are checked
_log = logging.getLogger(__name__)


class CallTimeouts:
    """The calls that keep the server waiting for one kind of event, and their timeout.

    It is ``seconds``, or ``under_pressure`` while ``has_pressure()``. At most ``max_slow`` calls may take longer than
    the latter.
    """

    def __init__(
        self,
        seconds: float,
        under_pressure: float,
        has_pressure: Callable[[], bool] = lambda: False,
        *,
        max_slow: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds = seconds
        self._under_pressure = min(under_pressure, seconds)
        self._has_pressure = has_pressure
        self._max_slow = max_slow
        self._clock = clock
        # Oldest first. Single operations on a dict need no lock.
        self._waiting: dict[object, tuple[float, Callable[[], None]]] = {}

    def start(self, call: object, on_timeout: Callable[[], None]) -> None:
        self._waiting[call] = (self._clock(), on_timeout)

    def clear(self, call: object) -> None:
        self._waiting.pop(call, None)

    def shorten(self, seconds: float) -> None:
        """Let a client take at most ``seconds`` under pressure."""
        self._under_pressure = min(self._under_pressure, seconds)

    def end_expired(self) -> None:
        """End the calls whose timeout has expired."""
        now, slow = self._clock(), 0
        limit = self._under_pressure if self._has_pressure() else self._seconds
        for call, (since, on_timeout) in self._waiting.copy().items():
            age = now - since
            is_slow = age > self._under_pressure
            slow += is_slow
            expired = age > limit or (is_slow and slow > self._max_slow)
            if expired and self._waiting.pop(call, None) is not None:
                try:
                    on_timeout()
                except Exception:  # noqa: BLE001 -- the other timeouts are checked all the same
                    _log.exception("an overdue call cannot be ended")
