"""Slices of an output: each index along each axis, judged by its error against its own variation over the samples.

A norm over a whole sample hides what is small behind what is large, so each output is also cut into slices. A slice is
all elements with one index along one axis (a channel, a token, a class), over all samples. Its *noise* is the mean
square of its errors. Its *variation* is the variance of its elements over the samples, pooled over the slice: half of
the mean square of the difference between successive samples (J. von Neumann, Ann. Math. Stat. 12, 1941), which needs no
mean and stays valid if the sizes of axes differ between samples. The *slice error* is the root of noise ÷ variation: 0
for an exact slice, about 1 for one that always has its mean value, 1.4 for one whose values belong to other samples.

A slice that does not vary beyond fp32's noise is judged by its relative error instead. Not judged are a slice that is
zero, one whose values vanish in fp32 beside 1 (or beside the output's largest value, if that is smaller), and one with
fewer than :data:`FEWEST` differences. Sums are in float64. An axis longer than :data:`GROUPS` is summed in groups of
neighbours, each judged as one slice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bf16kit.numerics.tensors import TensorSpec

GROUPS = 4096  # slices per axis
FEWEST = 8  # differences between samples: with fewer, the variation is not known
MOST = 10.0  # times its known variation that a slice may vary in one request: one outlier must not blind what follows
FP32_NOISE = 2.0**-18  # 64 unit roundoffs of fp32: a usual difference between fp32 programs that sum in another order

Values = NDArray[np.float64]
Scales = Sequence[Values]  # along each axis, the mean square that each slice's noise is judged against; inf: not judged


@dataclass(frozen=True, slots=True)
class SliceError:
    """The worst slice of an output: its error, axis and first index there; ``judged`` of ``slices`` could be judged."""

    error: float
    axis: int
    index: int
    judged: int
    slices: int


class SliceSums:
    """Sums of squares per slice, along every axis of ``spec`` but the batch's, and the number of elements in each sum.

    An axis of unknown length has a slice per index; indices beyond :data:`GROUPS` share the last one.
    """

    def __init__(self, spec: TensorSpec, batch_axis: int | None) -> None:
        free = [axis for axis in range(len(spec.shape)) if axis != batch_axis]
        self.axes = free or [0]  # a number per sample is one slice
        sizes = [spec.shape[axis] for axis in free] or [1]
        self.widths = [max(1, -(-size // GROUPS)) if isinstance(size, int) else 1 for size in sizes]
        self.sums: list[Values] = [np.zeros(0) for _ in sizes]
        self.counts: list[Values] = [np.zeros(0) for _ in sizes]

    def add(self, values: Values) -> None:
        """Add the squares of ``values`` of ``[samples, *axes]``; elements that are NaN are left out."""
        with np.errstate(over="ignore"):  # of float64 outputs; such a slice is not judged
            squares = np.einsum("n...,n...->...", values, values)
            count: Values | None = None  # as many as there are samples, for each element
            if not math.isfinite(squares.sum()):
                present = ~np.isnan(values)
                squares, count = np.square(np.where(present, values, 0.0)).sum(0), present.sum(0, dtype=np.float64)
        for axis in range(min(max(1, squares.ndim), len(self.widths))):
            sums = _along(squares, axis)
            counts = np.full(len(sums), len(values) * (squares.size / max(1, len(sums))))
            self._add(axis, *self._grouped(axis, sums, counts if count is None else _along(count, axis)))

    def merge(self, other: SliceSums, limits: Scales | None = None) -> None:
        """Add the sums of ``other``, of the same output; its mean square of a slice counts as ``limits`` at most."""
        for axis, (sums, counts) in enumerate(zip(other.sums, other.counts, strict=True)):
            if limits is not None:
                with np.errstate(invalid="ignore"):  # no limit and no element: 0 · inf, which fmin leaves out
                    sums = np.fmin(sums, _fitted(limits[axis], len(sums), math.inf) * counts)
            self._add(axis, sums, counts)

    def scale(self, factor: float) -> None:
        """Let everything added so far count ``factor`` times as much."""
        for array in (*self.sums, *self.counts):
            array *= factor

    def means(self) -> list[Values]:
        """Return the mean square of each slice along each axis; 0 for a slice without elements."""
        return [sums / np.where(counts > 0, counts, 1.0) for sums, counts in zip(self.sums, self.counts, strict=True)]

    def _add(self, axis: int, sums: Values, counts: Values) -> None:
        for totals, added in ((self.sums, sums), (self.counts, counts)):
            totals[axis] = _fitted(totals[axis], max(len(totals[axis]), len(added)))
            totals[axis][: len(added)] += added

    def _grouped(self, axis: int, sums: Values, counts: Values) -> tuple[Values, Values]:
        width = self.widths[axis]
        if width == 1 and len(sums) <= GROUPS:
            return sums, counts
        starts = np.arange(0, len(sums), width)[:GROUPS]
        return np.add.reduceat(sums, starts), np.add.reduceat(counts, starts)


def _along(array: Values, axis: int) -> Values:
    """Return the sums of ``array`` over all axes but ``axis``."""
    if array.ndim < 2:
        return array.reshape(-1)
    return np.asarray(array.sum(tuple(other for other in range(array.ndim) if other != axis)))


def _fitted(array: Values, size: int, fill: float = 0.0) -> Values:
    """Return the first ``size`` elements of ``array``, or all and ``fill`` behind them; a copy if that adds some."""
    missing = size - len(array)
    return np.pad(array, (0, missing), constant_values=fill) if missing > 0 else array[:size]


def limits_of(known: Scales | None, most: float) -> Scales | None:
    """Return the mean squares at ``most`` times ``known``, inf where none is known; None for None."""
    return None if known is None else [np.where(each > 0, most**2 * each, np.inf) for each in known]


class Variation:
    """The variation of a reference's output over its samples, per slice.

    ``known`` is that in other samples, as :meth:`scales` returned it, or 0 for a slice of which none is known: it is
    then never less, and one call to :meth:`add` counts as :data:`MOST` times as much at most. A sample of more than
    ``largest`` elements is not kept to be compared with the first of the next call.
    """

    def __init__(
        self, spec: TensorSpec, batch_axis: int | None, known: Scales | None = None, *, largest: int | None = None
    ) -> None:
        self._known = known
        self._limits = limits_of(known, MOST)
        self._largest = largest
        self._differences = SliceSums(spec, batch_axis)
        self._squares = SliceSums(spec, batch_axis)
        self._spec, self._batch_axis = spec, batch_axis
        self._last: Values | None = None
        self._peak = 0.0

    def add(self, samples: Values) -> None:
        """Add ``samples`` of ``[samples, *axes]``, in the order of the calls; elements that are NaN are left out."""
        if samples.size == 0:
            return
        self._squares.add(samples)
        if self._peak <= 1:
            self._peak = max(self._peak, float(np.nanmax(np.abs(samples), initial=0.0)))
        differences = self._differences if self._limits is None else SliceSums(self._spec, self._batch_axis)
        for difference in self._successive(samples):
            differences.add(difference * math.sqrt(0.5))
        if self._limits is not None:
            self._differences.merge(differences, self._limits)
        too_large = self._largest is not None and samples[0].size > self._largest
        self._last = None if too_large else samples[-1:].copy()

    def scale(self, factor: float) -> None:
        """Let everything added so far count ``factor`` times as much."""
        self._differences.scale(factor)
        self._squares.scale(factor)

    def scales(self, *, tiny: bool = False) -> list[Values]:
        """Return the :data:`Scales` of the samples added so far.

        ``tiny``: instead of slices that vanish beside 1, in an output with values above 1, which is none for others.
        """
        found = []
        floor = (FP32_NOISE * min(1.0, self._peak)) ** 2
        every = zip(self._squares.means(), self._differences.means(), self._differences.counts, strict=True)
        for axis, (magnitude, variation, counts) in enumerate(every):
            variation, counts = _fitted(variation, len(magnitude)), _fitted(counts, len(magnitude))
            scale = np.where(variation > FP32_NOISE**2 * magnitude, variation, magnitude)
            judged = (scale > 0) & (scale <= floor) & (self._peak > 1) if tiny else scale > floor
            scale = np.where(judged & (counts >= FEWEST), scale, np.inf)
            if self._known is not None:
                known = _fitted(self._known[axis], len(magnitude))
                scale = np.where(known > 0, np.maximum(variation, known), scale)
            found.append(scale)
        return found

    def _successive(self, samples: Values) -> Iterator[Values]:
        if self._last is not None and self._last.ndim == samples.ndim:
            sizes = zip(self._last.shape, samples.shape, strict=True)
            common = tuple(slice(0, min(pair)) for pair in sizes)  # of the first axis, the batch, that is one sample
            yield samples[common] - self._last[common]
        if len(samples) > 1:
            yield np.diff(samples, axis=0)


def worst_slices(noise: SliceSums, scales: Scales, most: int = 1) -> list[SliceError]:
    """Return the ``most`` slices whose ``noise`` is largest against ``scales``, worst first; none if none is judged."""
    found: list[tuple[float, int, int]] = []
    judged = slices = 0
    for axis, mean in enumerate(noise.means()):
        scale = _fitted(scales[axis], len(mean), math.inf)
        here = np.isfinite(scale) & np.isfinite(mean) & (noise.counts[axis] > 0)
        judged, slices = judged + int(here.sum()), slices + len(mean)
        if here.any():
            ratio = np.where(here, mean / scale, -1.0)
            # argmax for live drift, which asks for one of up to 50,000 slices at each request
            worst = np.argsort(-ratio, kind="stable")[:most] if most > 1 else [ratio.argmax()]
            found += [(float(ratio[i]), noise.axes[axis], int(i) * noise.widths[axis]) for i in worst if here[i]]
    found.sort(key=lambda each: -each[0])
    return [SliceError(math.sqrt(ratio), axis, index, judged, slices) for ratio, axis, index in found[:most]]
