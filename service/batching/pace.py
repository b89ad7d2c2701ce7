"""How long a model takes, as measured: what tells how long a request would have to wait."""

from __future__ import annotations

from collections.abc import Hashable

_WEIGHT = 0.2  # of the newest batch: the last ten or so decide
_SHAPES = 256  # remembered; callers choose shapes, and must not choose how much is remembered


class Pace:
    """Seconds per row, by shape (a batch's signature), each a moving average of the batches that ran.

    Not thread-safe: the queue that asks is behind a lock, and so is whoever tells.
    """

    def __init__(self) -> None:
        self._any: float | None = None
        self._of: dict[Hashable, float] = {}

    def observe(self, shape: Hashable, rows: int, seconds: float) -> None:
        """A batch of ``rows`` rows of this shape ran for ``seconds``."""
        per_row = seconds / max(rows, 1)
        self._any = _moved(self._any, per_row)
        known = self._of.pop(shape, None)
        if known is None and len(self._of) >= _SHAPES:
            del self._of[next(iter(self._of))]  # the one that has not run for longest
        self._of[shape] = _moved(known, per_row)

    def seconds(self, shape: Hashable, rows: int) -> float:
        """What ``rows`` rows of this shape are expected to take; 0 while nothing has run."""
        per_row = self._of.get(shape, self._any)
        return 0.0 if per_row is None else per_row * max(rows, 1)


def _moved(average: float | None, value: float) -> float:
    return value if average is None else average + _WEIGHT * (value - average)
