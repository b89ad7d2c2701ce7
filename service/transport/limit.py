"""How many calls may be inside: fewer than there are places while a model refuses most of what it is asked.

A model answers at the same rate however many requests wait, and what its queue refuses has been read, decoded and given
a thread first. So when queues refuse more than is answered, and answers take several times as long as alone, fewer
calls are let in, and the others are refused before they are read. Until then whoever finds a place may have it: nobody
is refused for the sake of others' latency.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

_WINDOW_S = 0.1
_SLOWER = 3.0  # than alone: what an answer may take while calls are refused in masses
_SLACK_S = 0.005  # beyond that: the threads' turns
_SHRINK, _GROW = 0.7, 1.25
_DRIFT = 1.001  # per answer: what is fastest now may be slower than what once was
_MODELS = 1024  # remembered


class AdaptiveLimit:
    """A number between ``least`` and ``most``: :attr:`now`. Tell it of refusals and of answers, on any
    thread: it takes no lock, since a count that is lost now and then changes nothing.
    """

    def __init__(self, most: int, least: int = 16, clock: Callable[[], float] = time.monotonic) -> None:
        self.now = most
        self._most = most
        self._least = min(least, most)
        self._clock = clock
        self._alone: dict[Hashable, float] = {}  # seconds of a model's fastest answers
        self._since = clock()
        self._forget()

    def refused(self) -> None:
        """A call was refused for want of room: by its model's queue, or, while few are let in, for that."""
        self._refused += 1
        self._turn()

    def answered(self, model: Hashable, seconds: float) -> None:
        """A call was answered ``seconds`` after its headers had come."""
        alone = min(seconds, self._alone.get(model, seconds) * _DRIFT)
        if model in self._alone or len(self._alone) < _MODELS:
            self._alone[model] = alone
        self._answered += 1
        self._slow += seconds > _SLOWER * alone + _SLACK_S
        self._turn()

    def _turn(self) -> None:
        """At the end of a window, draw the conclusion."""
        now = self._clock()
        if now - self._since < _WINDOW_S:
            return
        masses = self._refused > self._answered
        if masses and 2 * self._slow > self._answered:
            self.now = max(self._least, int(self.now * _SHRINK))
        elif not masses:
            self.now = min(self._most, int(self.now * _GROW) + 1)
        self._since = now
        self._forget()

    def _forget(self) -> None:
        self._refused = self._answered = self._slow = 0
