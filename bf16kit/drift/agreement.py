"""How many decisions a candidate has in common with its reference, sample by sample: classes of logits, or labels.

A row of logits (along the last axis) agrees if both have their largest element at the same index, or at one whose
element ties with the reference's largest (:data:`FP32_NOISE`). Labels agree if they are equal; of one sample, those
that both have its most frequent label count as one: it may be all but a few.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bf16kit.drift.slices import FP32_NOISE, Values


def top1(
    reference: NDArray[Any], candidate: NDArray[Any], judged: Values, classes: int | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return how many rows of ``classes`` elements agree in each sample, and how many rows a sample has.

    Fills are never the largest element.
    """
    if classes is None:
        return np.zeros(len(reference), np.int64), np.zeros(len(reference), np.int64)
    rows = math.prod(reference.shape[1:]) // classes
    r, c = (array.astype(np.float64).reshape(-1, classes) for array in (reference, candidate))
    fills = np.isnan(judged.reshape(-1, classes)) & np.isfinite(r) & np.isfinite(c)
    if fills.any():
        r, c = np.where(fills, -np.inf, r), np.where(fills, -np.inf, c)
    best, picked = r.argmax(axis=1)[:, None], c.argmax(axis=1)[:, None]
    largest, chosen = np.take_along_axis(r, best, axis=1), np.take_along_axis(r, picked, axis=1)
    with np.errstate(invalid="ignore"):  # infinite logits: two of the same sign are equal, but their difference is NaN
        tied = (chosen == largest) | (largest - chosen <= FP32_NOISE * np.minimum(np.abs(largest), np.abs(chosen)))
    tied |= best == picked
    return np.count_nonzero(tied.reshape(-1, rows), axis=1).astype(np.int64), np.full(len(reference), rows)


def equal(reference: NDArray[Any], candidate: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return how many labels of each sample agree, and how many it has."""
    size, rows = math.prod(reference.shape[1:]), np.zeros(len(reference), np.int64)
    matches = np.zeros_like(rows)
    pairs = zip(reference.reshape(-1, size), candidate.reshape(-1, size), strict=True) if size else ()
    for i, (r, c) in enumerate(pairs):
        values, counts = np.unique(r, return_counts=True)
        same = r == c
        repeated = max(1, int(np.count_nonzero(same & (r == values[counts.argmax()])))) - 1
        matches[i], rows[i] = np.count_nonzero(same) - repeated, size - repeated
    return matches, rows
