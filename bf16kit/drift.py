"""Drift: the distance between a candidate's outputs and the reference's on the same inputs, per output and per sample.

All in float64, r = reference, c = candidate, both flattened, over the elements where r is finite:

``relative_l2``      ‖c−r‖ / ‖r‖
``cosine_distance``  1 − c·r / (‖c‖‖r‖), computed as ½‖r/‖r‖ − c/‖c‖‖², which keeps its digits when the two nearly agree
``max_abs``          max |c−r|
``sqnr_db``          20·log10(‖r‖ / ‖c−r‖)
``top1_agreement``   share of rows (along the last axis) of a ``logits`` output where both have their largest element at
                     the same index, or at one whose element ties with the reference's largest (:data:`TIE`)
``nonfinite``        number of elements that are not finite where the reference is

A zero reference and a zero candidate have drift 0 (``sqnr_db`` +inf). A zero reference and a nonzero candidate have
``relative_l2`` inf and ``cosine_distance`` 1. A candidate that is not finite where the reference is, or has another
shape, is infinitely far: ``relative_l2`` and ``max_abs`` inf, ``cosine_distance`` 1, ``sqnr_db`` -inf. No value is NaN.

A few samples cannot tell an agreement of 0.99 from one of 0.98. So a budget bounds the upper confidence limit of the
agreement: Wilson's, one-sided, at 99 % (E. B. Wilson, J. Am. Stat. Assoc. 22, 1927). Rows of one sample, such as the
tokens of a sentence, are not independent, so the limit counts samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bf16kit.budget import METRICS, Breach, Budget
from bf16kit.tensors import TensorSpec

__all__ = ["DISTRIBUTIONS", "METRICS", "Breach", "Budget", "DriftSummary", "SampleDrift", "measure"]

DISTRIBUTIONS = ("relative_l2", "cosine_distance", "max_abs", "sqnr_db")  # those with a value per sample

# An element is tied with the row's largest when their distance is at most this share of either. It is 64 times fp32's
# unit roundoff, a usual difference between fp32 programs that sum in another order.
TIE = 2.0**-18
_Z = 2.3263478740408408  # quantile of the normal distribution: 99 % lie below it

_BLOCK = 1 << 20  # elements of float64 at a time, or one sample if a sample is larger


@dataclass(frozen=True, slots=True)
class SampleDrift:
    """The drift of one sample. ``top1_rows`` is 0 for outputs that are not logits."""

    relative_l2: float
    cosine_distance: float
    max_abs: float
    sqnr_db: float
    top1_matches: int
    top1_rows: int
    nonfinite: int


def measure(
    reference: NDArray[Any], candidate: NDArray[Any], spec: TensorSpec, batch_axis: int | None
) -> list[SampleDrift]:
    """Measure the drift of each sample: one :class:`SampleDrift` per index of ``batch_axis``.

    There is only one for ``None``, or if the output does not have that axis. Integers and booleans are compared as
    float64. For strings, r is all ones, and c is 1 where the strings are equal, else 0.
    """
    if reference.dtype == np.object_:
        same = reference == candidate if reference.shape == candidate.shape else np.zeros(())
        reference, candidate = np.ones(reference.shape), np.asarray(same, np.float64)
    axis = batch_axis if batch_axis is not None and batch_axis < reference.ndim else None
    if reference.shape != candidate.shape:
        return [_INFINITELY_FAR] * (1 if axis is None else reference.shape[axis])
    r, c = _samples_first(reference, axis), _samples_first(candidate, axis)
    logits = spec.kind == "logits" and reference.ndim > (0 if axis is None else 1) and reference.shape[-1] > 0
    classes = reference.shape[-1] if logits else None
    return [drift for rows in _blocks(r) for drift in _measure(r[rows], c[rows], classes)]


_INFINITELY_FAR = SampleDrift(math.inf, 1.0, math.inf, -math.inf, 0, 0, 0)


def _samples_first(array: NDArray[Any], axis: int | None) -> NDArray[Any]:
    """Reshape to ``[samples, elements]``; the last axis of the array stays last."""
    if axis is None:
        return array.reshape(1, -1)
    return np.moveaxis(array, axis, 0).reshape(array.shape[axis], math.prod(array.shape) // max(1, array.shape[axis]))


def _blocks(array: NDArray[Any]) -> Iterator[slice]:
    step = max(1, _BLOCK // max(1, array.shape[1]))
    return (slice(start, start + step) for start in range(0, array.shape[0], step))


def _measure(reference: NDArray[Any], candidate: NDArray[Any], classes: int | None) -> Iterator[SampleDrift]:
    """Drift of each row of two ``[samples, elements]`` arrays."""
    with np.errstate(invalid="ignore"):  # casting a NaN of a narrow type raises the flag
        r, c = reference.astype(np.float64), candidate.astype(np.float64)
    matches, rows = _top1(r, c, classes)
    judged = np.isfinite(r)
    nonfinite = np.count_nonzero(judged & ~np.isfinite(c), axis=1)
    far = nonfinite > 0
    r[~judged] = 0.0
    c[~judged] = 0.0
    c[far] = r[far]  # their distances are infinite anyway; this keeps infinities out of the sums
    relative, cosine, largest = _distances(r, c)
    for i in range(r.shape[0]):
        if far[i]:
            l2, cos, peak = math.inf, 1.0, math.inf
        else:
            l2, cos, peak = float(relative[i]), float(cosine[i]), float(largest[i])
        yield SampleDrift(l2, cos, peak, _decibels(l2), int(matches[i]), rows, int(nonfinite[i]))


def _distances(
    r: NDArray[np.float64], c: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """``relative_l2``, ``cosine_distance`` and ``max_abs`` of each row, all finite; overwrites ``r`` and ``c``."""
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        difference = c - r
        largest, difference_norm = _unit(difference), _norm(difference)
        del difference
        r_peak, c_peak = _unit(r), _unit(c)
        r_norm, c_norm = (_norm(np.array(x)) for x in (r, c))
        relative = (largest / r_peak) * (difference_norm / r_norm)
        r /= r_norm[:, None]
        c /= c_norm[:, None]
        r -= c
        cosine = 0.5 * np.square(_norm(r))
    both, either = (r_peak == 0) & (c_peak == 0), (r_peak == 0) | (c_peak == 0)
    relative = np.where(both, 0.0, np.where((r_peak == 0) | np.isnan(relative), np.inf, relative))
    cosine = np.where(both, 0.0, np.where(either, 1.0, cosine))
    return relative, cosine, largest


def _unit(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Divide each row by its largest magnitude, in place, so that squares neither overflow nor underflow.

    Returns these magnitudes, never -0, which negating a smallest value of 0 would give.
    """
    peak: NDArray[np.float64] = np.maximum(np.max(x, axis=1, initial=0.0), 0.0 - np.min(x, axis=1, initial=0.0))
    x /= np.where(peak == 0, 1.0, peak)[:, None]
    return peak


def _norm(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the norm of each row.

    ``x`` is overwritten with squares, because one sample of a large vocabulary is 51 MB.
    """
    return np.asarray(np.sqrt(np.add.reduce(np.square(x, out=x), axis=1)))


def _decibels(relative_l2: float) -> float:
    if relative_l2 == 0:
        return math.inf
    return -20.0 * math.log10(relative_l2) if math.isfinite(relative_l2) else -math.inf


def _top1(r: NDArray[np.float64], c: NDArray[np.float64], classes: int | None) -> tuple[NDArray[np.int64], int]:
    """Return how many rows of ``classes`` elements agree in each sample, and how many rows a sample has."""
    if classes is None:
        return np.zeros(r.shape[0], np.int64), 0
    rows = r.shape[1] // classes
    r, c = r.reshape(-1, classes), c.reshape(-1, classes)
    chosen = np.take_along_axis(r, c.argmax(axis=1)[:, None], axis=1)
    largest = np.take_along_axis(r, r.argmax(axis=1)[:, None], axis=1)
    with np.errstate(invalid="ignore"):  # infinite logits: two of the same sign are equal, but their difference is NaN
        tied = (chosen == largest) | (largest - chosen <= TIE * np.minimum(np.abs(largest), np.abs(chosen)))
    tied |= r.argmax(axis=1)[:, None] == c.argmax(axis=1)[:, None]
    return np.count_nonzero(tied.reshape(-1, rows), axis=1).astype(np.int64), rows


@dataclass(frozen=True, slots=True)
class DriftSummary:
    """The drift of many samples of one output.

    ``stats[metric][stat]``: metrics with a value per sample have ``mean``, ``p50``, ``p99`` and ``worst``, where
    ``p99`` and ``worst`` lie on the bad side (low for ``sqnr_db``). ``top1_agreement`` has ``mean``, the counted share,
    and ``upper``, its upper confidence limit; it is absent when the output is not logits. ``nonfinite`` has ``total``.
    """

    samples: int
    stats: Mapping[str, Mapping[str, float]]

    @classmethod
    def of(cls, samples: Iterable[SampleDrift]) -> DriftSummary:
        """Summarise at least one sample; ValueError for none."""
        drifts = list(samples)
        if not drifts:
            raise ValueError("no samples to summarise")
        stats = {metric: _distribution(metric, [getattr(d, metric) for d in drifts]) for metric in DISTRIBUTIONS}
        rows = sum(d.top1_rows for d in drifts)
        if rows:
            agreement = sum(d.top1_matches for d in drifts) / rows
            stats["top1_agreement"] = {"mean": agreement, "upper": upper_limit(agreement, len(drifts))}
        stats["nonfinite"] = {"total": float(sum(d.nonfinite for d in drifts))}
        return cls(len(drifts), stats)

    def judged(self, bound: str) -> float | None:
        """Return the number that the budget's ``bound`` applies to; ``None`` when this output has no such metric.

        For a metric that is the mean of ``relative_l2``, ``cosine_distance`` and ``sqnr_db``, the worst ``max_abs``,
        the upper limit of ``top1_agreement``, and the total of ``nonfinite``. For a quantile, such as
        ``relative_l2.p99``, it is that quantile.
        """
        metric, _, quantile = bound.partition(".")
        stats = self.stats.get(metric, {})
        if quantile:
            return stats.get(quantile)
        return stats.get("upper", stats.get("mean")) if metric == "top1_agreement" else stats.get(_JUDGED[metric])

    def measured(self, bound: str) -> float | None:
        """Return the measured number: as :meth:`judged`, but the counted share of ``top1_agreement``, not its limit."""
        return self.stats.get(bound, {}).get("mean") if bound == "top1_agreement" else self.judged(bound)

    def worst(self, bound: str) -> float | None:
        """Return the worst sample's value; for ``top1_agreement`` and ``nonfinite`` the measured one."""
        return self.stats.get(bound.partition(".")[0], {}).get("worst", self.measured(bound))

    def as_dict(self) -> dict[str, dict[str, float]]:
        """Return ``stats`` as nested dictionaries, as the manifest keeps them."""
        return {metric: dict(stats) for metric, stats in self.stats.items()}


_JUDGED = {
    "relative_l2": "mean",
    "cosine_distance": "mean",
    "max_abs": "worst",
    "sqnr_db": "mean",
    "nonfinite": "total",
}


def upper_limit(share: float, count: int) -> float:
    """Return Wilson's one-sided upper confidence limit, at 99 %, of a share counted over ``count`` independent samples.

    It is 1 only if ``share`` is 1: once one sample disagrees, no count supports full agreement.
    """
    squared = _Z * _Z / count
    spread = _Z * math.sqrt(share * (1 - share) / count + squared / (4 * count))
    return min(1.0, (share + squared / 2 + spread) / (1 + squared)) if share < 1 else 1.0


def _mean(ordered: list[float]) -> float:
    """Return the mean, or infinity when the worst is infinite.

    An exact sample's +inf dB is left out, because it would hide the others.
    """
    finite = [value for value in ordered if math.isfinite(value)]
    return ordered[-1] if math.isinf(ordered[-1]) else float(np.mean(finite))


def _distribution(metric: str, values: list[float]) -> dict[str, float]:
    ordered = sorted(values, reverse=metric == "sqnr_db")  # from best to worst
    return {
        "mean": _mean(ordered),
        "p50": ordered[(len(ordered) - 1) // 2],
        "p99": ordered[math.ceil(0.99 * len(ordered)) - 1],
        "worst": ordered[-1],
    }
