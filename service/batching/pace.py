"""The measured speed of a model, from which the queue estimates how long a request would wait."""

from __future__ import annotations

from collections.abc import Hashable

_WEIGHT = 0.2  # of the newest batch: about the last ten batches count
#: Batches after which the pace may reject requests. The first runs of a model are slow, since its memory and code are
#: cold, and they have few rows; after this many, the first one has an eighth of the weight.
ENOUGH_BATCHES = 10
_SHAPES = 256  # remembered at most: clients choose the shapes, and must not choose how much memory they take


class Pace:
    """Seconds per row by shape (a batch's signature), each a moving average over past batches.

    Not thread-safe: the batcher calls it with its lock held.
    """

    def __init__(self) -> None:
        self._overall: float | None = None
        self._batches = 0  # observed, up to ENOUGH_BATCHES
        self._by_shape: dict[Hashable, float] = {}

    def observe(self, shape: Hashable, rows: int, seconds: float) -> None:
        """Record that a batch of ``rows`` rows of this shape ran for ``seconds``."""
        per_row = seconds / max(rows, 1)
        self._overall = _moving_average(self._overall, per_row)
        self._batches = min(self._batches + 1, ENOUGH_BATCHES)
        known = self._by_shape.pop(shape, None)
        if known is None and len(self._by_shape) >= _SHAPES:
            del self._by_shape[next(iter(self._by_shape))]  # the shape that has not run for the longest time
        self._by_shape[shape] = _moving_average(known, per_row)

    def seconds(self, shape: Hashable, rows: int) -> float:
        """Return the expected run time of ``rows`` rows of this shape in seconds; 0 while nothing has run."""
        per_row = self._by_shape.get(shape, self._overall)
        return 0.0 if per_row is None else per_row * max(rows, 1)

    @property
    def settled(self) -> bool:
        """Whether enough batches have run for a limit to be judged by their pace."""
        return self._batches == ENOUGH_BATCHES


def _moving_average(average: float | None, value: float) -> float:
    return value if average is None else average + _WEIGHT * (value - average)
