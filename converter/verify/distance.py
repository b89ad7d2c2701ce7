"""The distance between two arrays that should be equal but for fp32 noise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bf16kit.drift import metrics as drift
from bf16kit.numerics.rounding import LARGEST, LOWEST
from converter.source import Array

_BLOCK = 1 << 20  # elements in float64 at a time
_SAMPLED = 4096  # elements by which fills are recognised


@dataclass(frozen=True, slots=True, order=True)
class Distance:
    """``relative_l2``: norm of the difference ÷ the larger norm; ``max_abs``: the largest absolute difference.

    Both are infinite if the shapes differ, or if an element is finite in one array only.
    """

    relative_l2: float
    max_abs: float


SAME = Distance(0.0, 0.0)
INCOMPARABLE = Distance(math.inf, math.inf)


def measure_distance(a: Array, b: Array) -> Distance:
    """Return the distance between two arrays of any dtypes, computed in float64, in blocks.

    Values that stand for infinity (masked logits) and are equal in both are left out, because they would dominate the
    norms. Values beyond bf16's range count as its largest value, because masks are clamped to it.
    """
    if a.shape != b.shape:
        return INCOMPARABLE
    if a.dtype == np.object_ or b.dtype == np.object_:
        return SAME if np.array_equal(a, b) else INCOMPARABLE
    fills, squares, largest = _fills(a), np.zeros(3), 0.0
    for x, y in _blocks(a, b):
        finite = np.isfinite(x)
        if not np.array_equal(finite, np.isfinite(y)) or not np.array_equal(x[~finite], y[~finite], equal_nan=True):
            return INCOMPARABLE
        kept = finite & ~(np.isin(x, fills) & (x == y))
        x, y = x[kept], y[kept]
        difference = y - x
        squares += [difference @ difference, x @ x, y @ y]
        largest = max(largest, float(np.abs(difference).max(initial=0.0)))
    if squares[0] == 0:
        return SAME
    return Distance(float(np.sqrt(squares[0] / squares[1:].max())), largest)


def mask_unstable(array: Array, source: Array, runs: Sequence[Array]) -> Array:
    """Return ``array``, with each non-float value taken from ``source`` where the ``runs`` differ from each other.

    A float array is returned as it is. If noise flips an index, a flag or a number of rows, it says nothing about which
    program computed it.
    """
    if any(run.shape != runs[0].shape for run in runs):
        return source if array.shape != source.shape or not is_float(array) else array
    if is_float(array) or not array.shape == source.shape == runs[0].shape:
        return array
    unstable = np.zeros(array.shape, bool)
    for run in runs:
        unstable |= run != runs[0]
    return np.where(unstable, source, array)


def is_float(array: Array) -> bool:
    """Whether the values are rounded, so that noise moves them a little. numpy knows no kind for bfloat16."""
    return array.dtype.kind == "f" or array.dtype.name == "bfloat16"


def _fills(array: Array) -> list[float]:
    """Return the constants that stand for infinity, as drift leaves them out (:func:`bf16kit.drift.metrics.fills`)."""
    if not is_float(array) or array.size == 0:
        return []
    ends = [(x.min(), x.max()) for x, _ in _blocks(array, array, finite=True) if x.size]
    if not ends:
        return []
    flat = array.reshape(-1)
    sampled = _limited(flat[:: max(1, flat.size // _SAMPLED)])
    return drift.fills(sampled, float(min(low for low, _ in ends)), float(max(high for _, high in ends)))


def _limited(array: Array) -> NDArray[np.float64]:
    wide = array.astype(np.float64)
    return np.where(np.isfinite(wide), np.clip(wide, LOWEST, LARGEST), wide)


def _blocks(a: Array, b: Array, *, finite: bool = False) -> Iterator[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    for start in range(0, flat_a.size, _BLOCK):
        x, y = (_limited(flat[start : start + _BLOCK]) for flat in (flat_a, flat_b))
        if finite:
            x, y = x[np.isfinite(x)], y[np.isfinite(y)]
        yield x, y
