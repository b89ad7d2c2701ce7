"""Finds the rows of live inputs that hold values outside the calibrated range, and outputs that are not finite."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from bf16kit.drift.measurements import InputRange
from bf16kit.drift.metrics import has_slices
from service.contract import Array


def all_finite(output: Array) -> bool:
    """Return whether no element is infinite or NaN; strings and integers are always finite."""
    if not has_slices(output):
        return True
    with np.errstate(invalid="ignore"):  # casting a NaN of a narrow type raises the flag
        return bool(np.isfinite(output.astype(np.float64, copy=False)).all())


class RangeChecker:
    """``ranges`` holds the range of each input that has one. An input without a range is never outside."""

    def __init__(self, ranges: Mapping[str, InputRange], batch_axis: int | None) -> None:
        self.ranges = ranges
        self._batch_axis = batch_axis

    def outside(self, feeds: Mapping[str, Array], rows: int) -> dict[str, NDArray[np.bool_]]:
        """Return, for each input that has a range, a mask [rows] of the rows that lie outside it."""
        return {name: self._rows(feeds[name], known, rows) for name, known in self.ranges.items() if name in feeds}

    def _rows(self, array: Array, known: InputRange, rows: int) -> NDArray[np.bool_]:
        axis = self._batch_axis
        out = known.outside(array)
        if axis is None or axis >= array.ndim or array.shape[axis] != rows:
            return np.full(rows, bool(out.any()))
        return np.asarray(out.any(axis=tuple(i for i in range(array.ndim) if i != axis)))
