"""How far two answers to the same question are apart that should be the same but for fp32 noise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bf16kit.numerics import LARGEST, LOWEST
from converter.model import Array

_BLOCK = 1 << 20  # elements in float64 at a time
_SAMPLED = 4096  # elements whose median is the output's scale
_TINY = 2.0**-126
_MASKED = 1e3  # an output's lowest value so many times below its scale stands for minus infinity


@dataclass(frozen=True, slots=True, order=True)
class Distance:
    """``relative_l2``: the norm of the difference by the larger of the two norms; ``max_abs``: the largest difference.

    Both are infinite when shapes differ or one is finite where the other is not.
    """

    relative_l2: float
    max_abs: float


SAME = Distance(0.0, 0.0)
INCOMPARABLE = Distance(math.inf, math.inf)


def between(a: Array, b: Array) -> Distance:
    """The distance of two arrays of any dtypes, in float64, in blocks.

    Values that stand for minus infinity (masked logits) and are the same in both count for nothing: with them in the
    norms, nothing else would. What bf16 cannot hold counts as the largest value that it can: masks are clamped to it.
    """
    if a.shape != b.shape:
        return INCOMPARABLE
    if a.dtype == np.object_ or b.dtype == np.object_:
        return SAME if np.array_equal(a, b) else INCOMPARABLE
    lowest, squares, largest = _lowest_if_mask(a), np.zeros(3), 0.0
    for x, y in _blocks(a, b):
        finite = np.isfinite(x)
        if not np.array_equal(finite, np.isfinite(y)) or not np.array_equal(x[~finite], y[~finite], equal_nan=True):
            return INCOMPARABLE
        kept = finite & ((x != lowest) | (y != lowest))
        x, y = x[kept], y[kept]
        difference = y - x
        squares += [difference @ difference, x @ x, y @ y]
        largest = max(largest, float(np.abs(difference).max(initial=0.0)))
    if squares[0] == 0:
        return SAME
    return Distance(float(np.sqrt(squares[0] / squares[1:].max())), largest)


def leave_out(array: Array, source: Array, changed: Sequence[Array]) -> Array:
    """``array`` with the values of ``source`` where one of ``changed``, its likes, has another; floats as they are.

    An index or a flag that noise flips says nothing about who computed it, nor does a number of rows.
    """
    if array.shape != source.shape:
        return source if any(other.shape != array.shape for other in changed) else array
    if is_float(array):
        return array
    unstable = np.zeros(array.shape, bool)
    for other in changed:
        unstable |= (other != array) if other.shape == array.shape else True
    return np.where(unstable, source, array)


def is_float(array: Array) -> bool:
    """Whether its values are rounded, so that noise moves them a little: bfloat16 is of no kind that numpy knows."""
    return array.dtype.kind == "f" or array.dtype.name == "bfloat16"


def _lowest_if_mask(array: Array) -> float:
    """The lowest finite value when it stands for minus infinity, else NaN, which nothing equals."""
    if not is_float(array) or array.size == 0:
        return math.nan
    flat = array.reshape(-1)
    lowest = min((float(x.min(initial=np.inf)) for x, _ in _blocks(flat, flat, finite=True)), default=math.inf)
    sampled = _limited(flat[:: max(1, flat.size // _SAMPLED)])
    others = np.abs(sampled[np.isfinite(sampled) & (sampled != lowest)])
    scale = float(np.median(others)) if others.size else abs(lowest)
    return lowest if lowest < -_MASKED * max(scale, _TINY) else math.nan


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
