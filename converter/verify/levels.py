"""Errors that a level hides: one that the values of a sample share, and no two samples.

Norms see the level, and slices how it varies between samples. So the error is compared with what the values of one
sample differ by.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from bf16kit.converter.verify.measure import Drifts, Expected
from bf16kit.drift.metrics import has_slices, samples_first
from bf16kit.drift.slices import FP32_NOISE
from bf16kit.numerics.tensors import Array

_MOST = 16  # feeds, and samples of each, that are compared


def levels_of(expected: Expected, batch_axis: int | None) -> list[dict[str, list[float]]]:
    """Return, by feed and output, the size of each sample ÷ by how much its values differ.

    NaN where that says nothing: for one value per sample, values that are equal in fp32, and infinities.
    """
    found = []
    for outputs in expected.outputs[: min(expected.given, _MOST)]:
        judged = {name: array for name, array in outputs.items() if has_slices(array) and array.size}
        found.append(
            {
                name: [_level(sample) for sample in samples_first(array, batch_axis)[:_MOST]]
                for name, array in judged.items()
            }
        )
    return found


def _level(sample: Array) -> float:
    values = sample.astype(np.float64)
    with np.errstate(invalid="ignore"):  # infinities, of masked logits
        size, differing = math.sqrt(np.square(values).mean()), float(values.std())
    return size / differing if FP32_NOISE * size < differing < math.inf else math.nan


def lost_in_samples(found: Sequence[Drifts], samples: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Return the error of each output ÷ by how much the values of a sample differ, in the median of ``samples``.

    These are :func:`levels_of`, of which there may be fewer than there is drift in ``found``.
    """
    ratios: dict[str, list[float]] = {}
    for drifts_of, by_output in zip(found, samples, strict=False):
        for name, each in by_output.items():
            errors = (row.relative_l2 * level for row, level in zip(drifts_of[name].rows, each, strict=False))
            ratios.setdefault(name, []).extend(error for error in errors if not math.isnan(error))
    return {name: float(np.median(each)) for name, each in ratios.items() if each}
