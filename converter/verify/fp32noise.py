"""Measures a model's fp32 noise: how its outputs change when every weight is perturbed by a few ulps.

A sum of products computed in another order is, to the last bit, the exact sum for weights that differ by a few ulps
(backward error). So the change that perturbed weights cause is the difference that another program may show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bf16kit.converter.source import FP32_ROUNDOFF, Array, Feeds
from bf16kit.converter.verify.measure import Spool
from bf16kit.converter.verify.running import ReadWeight
from bf16kit.drift import metrics as drift
from bf16kit.messages.errors import RuntimeFailure
from bf16kit.numerics.rounding import LARGEST, LOWEST
from bf16kit.runtime import Runtime

ULPS = 16
_RUNS = 3
_BLOCK = 1 << 20  # elements at a time
_INFINITY = 0x7F800000  # its bits


def perturb(array: Array, random: np.random.Generator, roundoff: float = FP32_ROUNDOFF) -> Array:
    """Return ``array`` with each fp32 value moved up or down by up to :data:`ULPS` units in the last place.

    If the source's arithmetic is coarser than fp32, with a larger unit ``roundoff``, values move by as many units of
    that arithmetic. Other dtypes, zeros, and values that would change sign or become infinite are unchanged.
    """
    if array.dtype != np.float32:
        return array
    max_units = int(ULPS * roundoff / FP32_ROUNDOFF)
    moved: NDArray[np.float32] = np.array(array, order="C")
    bits = moved.reshape(-1).view(np.int32)
    for start in range(0, bits.size, _BLOCK):
        chunk = bits[start : start + _BLOCK]
        magnitude = chunk & 0x7FFFFFFF
        movable = (magnitude > max_units) & (magnitude < _INFINITY - max_units)
        chunk[movable] += random.integers(-max_units, max_units + 1, chunk.size, np.int32)[movable]
    return moved


class Noise:
    """The fp32 noise of one graph: how its outputs for ``feeds`` change when its weights and the feeds are perturbed.

    ``open_graph`` opens the graph with the weights that it is given, perturbed or as they are. Both runs read the
    source's own weights and go the same way, so no fault in the files or graphs that are judged can widen their bound.
    Nothing runs before the noise is asked for, and it is measured once. Outputs are kept in unnamed files in
    ``scratch``.
    """

    def __init__(
        self, open_graph: Callable[[ReadWeight], Runtime], feeds: Sequence[Feeds], roundoff: float, scratch: Path | None
    ) -> None:
        self._open, self._feeds, self._roundoff, self._scratch = open_graph, feeds, roundoff, scratch

    def largest_change(self, name: str) -> float:
        """Return the largest relative change of an output."""
        pairs = (pair for run in self.pairs(name) for pair in run)
        return max((measure_distance(*pair).relative_l2 for pair in pairs), default=0.0)

    def pairs(self, name: str) -> list[list[tuple[Array, Array]]]:
        """Return an output of each feed as it is and perturbed, for each perturbed run."""
        unchanged, *runs = self._runs
        return [[(one[name], other[name]) for one, other in zip(unchanged, run, strict=True)] for run in runs]

    def without_unstable(self, array: Array, source: Array, name: str, feed: int) -> Array:
        """Return ``array``, an output for one feed, with values that noise flips taken from ``source``.

        A float array is returned as it is. If noise flips an index, a flag or a number of rows, it says nothing about
        which program computed it.
        """
        first, *others = (run[feed][name] for run in self._runs)
        if any(other.shape != first.shape for other in others):
            return source if array.shape != source.shape or not drift.has_slices(array) else array
        if drift.has_slices(array) or not array.shape == source.shape == first.shape:
            return array
        return np.where(np.any([other != first for other in others] or [False], axis=0), source, array)

    @cached_property
    def _runs(self) -> list[Spool]:
        """The outputs of the graph as it is, then those of each perturbed run."""
        runs = [self._run(None), *(self._run(np.random.default_rng(seed)) for seed in range(_RUNS))]
        return [run for run in runs if run is not None]

    def _run(self, random: np.random.Generator | None) -> Spool | None:
        """Return the outputs of the graph; None if it does not run perturbed, because noise changed a computed size."""

        def moved(array: Array) -> Array:
            return array if random is None else perturb(array, random, self._roundoff)

        with closing(self._open(lambda _name, tensor: moved(tensor.numpy()))) as runtime:
            try:
                feeds = ({name: moved(array) for name, array in feed.items()} for feed in self._feeds)
                return Spool(self._scratch, map(runtime.run, feeds))
            except RuntimeFailure:
                if random is None:
                    raise
                return None


class Distance(NamedTuple):
    """``relative_l2``: norm of the difference ÷ the larger norm; ``max_abs``: the largest absolute difference.

    Both are infinite if the shapes differ, or if an element is finite in one array only.
    """

    relative_l2: float
    max_abs: float


SAME = Distance(0.0, 0.0)
INCOMPARABLE = Distance(math.inf, math.inf)


def measure_distance(a: Array, b: Array) -> Distance:
    """Return the distance between two arrays of any dtypes, computed in float64, in blocks along the first axis.

    Fills are left out as in drift (:func:`bf16kit.drift.metrics.difference`). Values beyond bf16's range count as its
    largest value, because masks are clamped to it.
    """
    if a.shape != b.shape:
        return INCOMPARABLE
    if a.dtype == np.object_ or b.dtype == np.object_:
        return SAME if np.array_equal(a, b) else INCOMPARABLE
    a, b, squares, largest = np.atleast_1d(a), np.atleast_1d(b), np.zeros(3), 0.0
    for block in drift.blocks(a):
        one, other = _limited(a[block]), _limited(b[block])
        _, error, nonfinite = drift.difference(one, other)
        if nonfinite.any():
            return INCOMPARABLE
        judged = ~np.isnan(error)
        difference, x, y = error[judged], one[judged], other[judged]
        squares += [difference @ difference, x @ x, y @ y]
        largest = max(largest, float(np.abs(difference).max(initial=0.0)))
    if squares[0] == 0:
        return SAME
    return Distance(float(np.sqrt(squares[0] / squares[1:].max())), largest)


def _limited(array: Array) -> NDArray[np.float64]:
    wide = array.astype(np.float64)
    return np.where(np.isfinite(wide), np.clip(wide, LOWEST, LARGEST), wide)
