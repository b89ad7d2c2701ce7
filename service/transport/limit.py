"""Adapts the number of admitted calls: below the number of places while models reject most of their requests.

A model's throughput does not depend on how many requests wait, and a request that its queue rejects has already been
read, decoded and given a thread. Fewer calls are therefore admitted when queues reject more requests than are answered
and responses take several times as long as without load. The others are rejected before they are read. Otherwise every
call gets a free place: none is rejected to improve the latency of others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

_WINDOW_S = 0.1
_SLOWER = 3.0  # factor over the time without load that a response may take before the limit shrinks
_SLACK_S = 0.005  # in addition, for thread switches
_SHRINK, _GROW = 0.7, 1.25
_DRIFT = 1.001  # per response: the fastest response may become slower over time
_MODELS = 1024  # models remembered


class AdaptiveLimit:
    """The limit :attr:`current`, between ``least`` and ``most``, adapted to reported rejections and responses.

    Any thread may report. It takes no lock, because a lost count now and then changes nothing.
    """

    def __init__(self, most: int, least: int = 16, clock: Callable[[], float] = time.monotonic) -> None:
        self.current = most
        self._most = most
        self._least = min(least, most)
        self._clock = clock
        self._fastest: dict[Hashable, float] = {}  # seconds of each model's fastest responses
        self._since = clock()
        self._reset()

    def count_refusal(self) -> None:
        """Count a call rejected for lack of room: by its model's queue, or on admission while the limit is lowered."""
        self._refused += 1
        self._adjust()

    def count_response(self, model: Hashable, seconds: float) -> None:
        """Count a call completed ``seconds`` after its headers arrived."""
        fastest = min(seconds, self._fastest.get(model, seconds) * _DRIFT)
        if model in self._fastest or len(self._fastest) < _MODELS:
            self._fastest[model] = fastest
        self._completed += 1
        self._slow += seconds > _SLOWER * fastest + _SLACK_S
        self._adjust()

    def _adjust(self) -> None:
        """Adjust the limit at the end of a window."""
        now = self._clock()
        if now - self._since < _WINDOW_S:
            return
        mostly_refused = self._refused > self._completed
        if mostly_refused and 2 * self._slow > self._completed:
            self.current = max(self._least, int(self.current * _SHRINK))
        elif not mostly_refused:
            self.current = min(self._most, int(self.current * _GROW) + 1)
        self._since = now
        self._reset()

    def _reset(self) -> None:
        self._refused = self._completed = self._slow = 0
