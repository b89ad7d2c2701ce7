"""Drift: the distance between a candidate's outputs and the reference's on the same inputs, per output and per sample.

All in float64, r = reference, c = candidate, both flattened, over the elements where r is finite and is not a fill:

``relative_l2``      ‖c−r‖ / ‖r‖
``cosine_distance``  1 − c·r / (‖c‖‖r‖), computed from c−r, which keeps its digits when the two nearly agree
``max_abs``          max |c−r|
``sqnr_db``          20·log10(‖r‖ / ‖c−r‖)
``top1_agreement``   share of rows, or of labels, of a ``logits`` output that agree (:mod:`bf16kit.drift.agreement`)
``nonfinite``        number of elements that are not finite in either and differ
``slice_error``      the largest error of a slice ÷ its own variation over the samples (:mod:`bf16kit.drift.slices`);
                     only of outputs of floats, over all samples

A *fill*, such as the -1e9 of masked scores, stands for infinity and would dominate every norm: the output's smallest or
largest element, :data:`FILL` times beyond 1 and the others' usual magnitude, which the candidate has, too, at most
rounded to bf16.

A zero reference and a zero candidate have drift 0 (``sqnr_db`` +inf). A zero reference and a nonzero candidate have
``relative_l2`` inf and ``cosine_distance`` 1. A candidate with a nonfinite element, or another shape, is infinitely
far: ``relative_l2`` and ``max_abs`` inf, ``cosine_distance`` 1, ``sqnr_db`` -inf. No value is NaN. An output of one
number per sample has neither an angle nor a magnitude to relate an error to: it is judged as one slice if it can be.
Nor have labels: they are judged by agreement.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bf16kit.drift.agreement import equal, top1
from bf16kit.drift.budget import METRICS as METRICS
from bf16kit.drift.budget import Breach as Breach
from bf16kit.drift.budget import Budget as Budget
from bf16kit.drift.slices import Scales, SliceError, SliceSums, Values, Variation, worst_slices
from bf16kit.numerics.rounding import LARGEST, OVERFLOW, to_bf16, to_fp32
from bf16kit.numerics.tensors import TensorSpec

DISTRIBUTIONS = ("relative_l2", "cosine_distance", "max_abs", "sqnr_db")  # those with a value per sample
OF_VECTORS = ("relative_l2", "cosine_distance", "sqnr_db")  # these mean nothing for one number per sample
_JUDGED = {"max_abs": "worst", "slice_error": "worst", "nonfinite": "total"}  # of the others the mean
FILL = 1e3
# Of the given samples. With fewer, made ones count in agreement too, whose default bound, 0.99, needs as many; and a
# p99 is not judged: it would be the worst.
ROWS = 100
_TYPICAL = 512  # elements whose median magnitude is taken as usual
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


_INFINITELY_FAR = SampleDrift(math.inf, 1.0, math.inf, -math.inf, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class OutputDrift:
    """The drift of one output: of each sample, and the sums of its slices' errors, None for outputs without slices.

    ``scales`` are what these are judged against, None if unknown. ``scalar``: the output is one float per sample, or
    labels.
    ``made``: the samples were made of others, too few to judge slices and agreement by; other metrics leave them out.
    ``parts``: the drift of the same samples, a few at a time, if that was measured too.
    """

    rows: list[SampleDrift]
    noise: SliceSums | None = None
    scales: Scales | None = None
    scalar: bool = False
    made: bool = False
    parts: tuple[OutputDrift, ...] = ()


def compare(
    reference: NDArray[Any],
    candidate: NDArray[Any],
    spec: TensorSpec,
    batch_axis: int | None,
    scales: Scales | None = None,
    variation: Variation | None = None,
) -> OutputDrift:
    """Measure the drift of each sample: one per index of ``batch_axis``; one for ``None``, or if there is no such axis.

    The errors of each slice are summed, to be judged against ``scales``, and the reference's samples are added to
    ``variation``. Integers and booleans are compared as float64. For strings, r is all ones, and c is 1 where the
    strings are equal, else 0.
    """
    if reference.dtype == np.object_:
        same = reference == candidate if reference.shape == candidate.shape else np.zeros(())
        reference, candidate = np.ones(reference.shape), np.asarray(same, np.float64)
    r = samples_first(reference, batch_axis)
    if reference.shape != candidate.shape:
        return OutputDrift([_INFINITELY_FAR] * len(r))
    c = samples_first(candidate, batch_axis)
    ranked = spec.kind == "logits" and r.ndim > 1 and reference.shape[-1] > 0
    classes = reference.shape[-1] if ranked else None
    noise = SliceSums(spec, batch_axis) if has_slices(reference) else None
    rows: list[SampleDrift] = []
    for block in blocks(r):
        judged, error, nonfinite = difference(r[block], c[block])
        agreeing = equal(r[block], c[block]) if spec.labels else top1(r[block], c[block], judged, classes)
        rows += _sample_drifts(judged, error, nonfinite, *agreeing)
        if noise is not None:
            noise.add(error)
            if variation is not None:
                variation.add(judged)
    return OutputDrift(rows, noise, scales, spec.labels or (noise is not None and math.prod(r.shape[1:]) == 1))


def has_slices(array: NDArray[Any]) -> bool:
    """Whether ``array``, an output, holds floats. Integers are indices, flags or counts: no noise, no variation."""
    return array.dtype.kind == "f" or array.dtype.name == "bfloat16"


def samples_first(array: NDArray[Any], batch_axis: int | None) -> NDArray[Any]:
    """Return ``array`` as ``[samples, *axes]``: one sample for None, or if ``array`` does not have that axis."""
    if batch_axis is None or batch_axis >= array.ndim:
        return array[None]
    return np.moveaxis(array, batch_axis, 0)


def blocks(array: NDArray[Any]) -> Iterator[slice]:
    """Yield the samples of ``[samples, *axes]`` in parts of up to :data:`_BLOCK` elements, at least one sample each."""
    step = max(1, _BLOCK // max(1, math.prod(array.shape[1:])))
    return (slice(start, start + step) for start in range(0, len(array), step))


def add_variation(variation: Variation, reference: NDArray[Any], batch_axis: int | None) -> None:
    """Add the samples of ``reference`` to ``variation``, without nonfinite elements and fills.

    They are added in a random order: neighbours in a series differ less than strangers do.
    """
    samples = samples_first(reference, batch_axis)
    if len(samples) > 1:
        samples = samples[np.random.default_rng(len(samples)).permutation(len(samples))]
    for block in blocks(samples):
        variation.add(difference(samples[block], samples[block])[0])


def difference(reference: NDArray[Any], candidate: NDArray[Any]) -> tuple[Values, Values, NDArray[np.int64]]:
    """Return r and c − r of ``[samples, *axes]``, and the number of nonfinite elements that differ in each sample.

    Both are NaN where r is not finite, where both hold a fill, and where c is not finite.
    """
    with np.errstate(invalid="ignore", over="ignore"):  # casting a NaN of a narrow type raises the flag
        r, c = reference.astype(np.float64), candidate.astype(np.float64)
        error = c - r
        if r.size and np.isfinite((low := r.min()) + (high := r.max()) + error.sum()) and not fills(r, low, high):
            return r, error, np.zeros(len(r), np.int64)
        known = np.isfinite(r)
        differ = (known != np.isfinite(c)) | (~known & (r != c) & ~(np.isnan(r) & np.isnan(c)))
        left_out, numbers = ~known | differ, r[known]
        for fill in fills(r, float(numbers.min()), float(numbers.max())) if numbers.size else ():
            left_out |= (r == fill) & ((c == fill) | (c == _rounded(fill)))
        r[left_out] = error[left_out] = np.nan
    return r, error, differ.sum(tuple(range(1, differ.ndim)), dtype=np.int64)


def fills(r: NDArray[Any], low: float, high: float) -> list[float]:
    """Return the fills of ``r`` among the ends ``low`` and ``high`` of its finite elements."""
    flat = r.reshape(-1)
    sampled = flat[:: max(1, flat.size // _TYPICAL)].astype(np.float64)
    others = np.abs(sampled[np.isfinite(sampled) & (sampled != low) & (sampled != high) & (sampled != 0)])
    middle = (others.size - 1) // 2
    # np.partition takes a tenth of np.median's time. Below 1 a large value may be a saturated probability.
    usual = max(1.0, float(np.partition(others, middle)[middle])) if others.size else math.inf
    return [end for end in (low, high) if abs(end) > FILL * usual]


def _rounded(fill: float) -> float:
    """Return ``fill`` as bf16 holds it; conversions clamp constants that would overflow to the largest number."""
    if abs(fill) >= OVERFLOW:
        return math.copysign(LARGEST, fill)
    return float(to_fp32(to_bf16(np.array([fill], np.float32)))[0])


def _sample_drifts(
    r: Values, error: Values, nonfinite: NDArray[np.int64], matches: NDArray[np.int64], rows: NDArray[np.int64]
) -> Iterator[SampleDrift]:
    """Yield the drift of each sample of ``[samples, *axes]``; elements that are NaN are left out."""
    r, error = r.reshape(len(r), -1), error.reshape(len(error), -1)
    if np.isnan(np.einsum("ne->", r)) or np.isnan(np.einsum("ne->", error)):
        r, error = np.nan_to_num(r), np.nan_to_num(error)
    peak = max(float(np.abs(r).max(initial=0.0)), float(np.abs(error).max(initial=0.0)))
    peak = 1.0 if not peak or 1e-140 < peak < 1e140 else peak  # of float64, whose squares would leave the range
    if peak != 1.0:
        r, error = r / peak, error / peak
    largest = np.maximum(error.max(axis=1, initial=0.0), 0.0 - error.min(axis=1, initial=0.0))
    rr, dd, rd = (np.einsum("ne,ne->n", a, b) for a, b in ((r, r), (error, error), (r, error)))
    for i in range(len(r)):
        relative, cosine, worst = math.inf, 1.0, math.inf
        if not nonfinite[i]:
            relative, cosine, worst = *_norms(float(rr[i]), float(dd[i]), float(rd[i])), float(largest[i]) * peak
        yield SampleDrift(
            relative, cosine, worst, _decibels(relative), int(matches[i]), int(rows[i]), int(nonfinite[i])
        )


def _norms(rr: float, dd: float, rd: float) -> tuple[float, float]:
    """Return relative_l2 and cosine_distance from r·r, d·d and r·d, where d = c − r.

    1 − cos = (d·d − (‖c‖−‖r‖)²) / (2‖c‖‖r‖), and ‖c‖−‖r‖ = (2r·d + d·d) / (‖c‖+‖r‖). That keeps its digits while d is
    small; for a large d, r·c = r·r + r·d does.
    """
    cc = max(0.0, rr + 2 * rd + dd)
    if dd == 0:
        return 0.0, 0.0
    if rr == 0:
        return math.inf, 1.0
    if cc == 0:
        return 1.0, 1.0
    norms = math.sqrt(rr) * math.sqrt(cc)
    if dd > 0.1 * rr:
        return math.sqrt(dd / rr), min(2.0, max(0.0, 1 - (rr + rd) / norms))
    longer = (2 * rd + dd) / (math.sqrt(rr) + math.sqrt(cc))
    return math.sqrt(dd / rr), max(0.0, dd - longer * longer) / (2 * norms)


def _decibels(relative_l2: float) -> float:
    if relative_l2 == 0:
        return math.inf
    return -20.0 * math.log10(relative_l2) if math.isfinite(relative_l2) else -math.inf


def worst_of(found: Sequence[OutputDrift], most: int = 1) -> list[SliceError]:
    """Return the ``most`` worst slices of one output over several runs, worst first; none if none is judged."""
    noises, scales = [each.noise for each in found if each.noise is not None], found[0].scales
    if not noises or scales is None:
        return []
    noise = copy.deepcopy(noises[0])
    for other in noises[1:]:
        noise.merge(other)
    return worst_slices(noise, scales, most)


@dataclass(frozen=True, slots=True)
class DriftSummary:
    """The drift of many samples of one output.

    ``stats[metric][stat]``: metrics with a value per sample have ``mean``, ``p50``, ``p99`` and ``worst``, the latter
    two on the bad side (low for ``sqnr_db``). ``top1_agreement``, of logits and labels, has ``mean``, the counted
    share, and ``rows``. ``nonfinite`` has ``total``. ``slice_error``, if a slice is judged, has ``worst`` and the other
    fields of :class:`~bf16kit.drift.slices.SliceError`.
    """

    samples: int
    stats: Mapping[str, Mapping[str, float]]

    @classmethod
    def of(
        cls,
        samples: Iterable[SampleDrift],
        worst: SliceError | None = None,
        *,
        made: Iterable[SampleDrift] = (),
        scalar: bool = False,
    ) -> DriftSummary:
        """Summarise at least one sample, and the ``worst`` slice; :class:`OutputDrift` explains the others."""
        drifts = list(samples)
        if not drifts:
            raise ValueError("no samples to summarise")
        metrics = [metric for metric in DISTRIBUTIONS if not scalar or metric not in OF_VECTORS]
        stats = {metric: _distribution(metric, [getattr(d, metric) for d in drifts]) for metric in metrics}
        every = [*drifts, *made]
        judged = drifts if sum(d.top1_rows for d in drifts) >= ROWS else every
        rows = sum(d.top1_rows for d in judged)
        if rows:
            stats["top1_agreement"] = {"mean": sum(d.top1_matches for d in judged) / rows, "rows": float(rows)}
        stats["nonfinite"] = {"total": float(sum(d.nonfinite for d in every))}
        if worst is not None:
            where = {"axis": worst.axis, "index": worst.index, "judged": worst.judged, "slices": worst.slices}
            stats["slice_error"] = {"worst": worst.error} | {name: float(value) for name, value in where.items()}
        return cls(len(drifts), stats)

    @classmethod
    def joined(cls, found: Sequence[OutputDrift]) -> DriftSummary:
        """Summarise the drift of one output in several runs; ValueError if no run has a sample."""
        worst = next(iter(worst_of(found)), None)
        given, made = ([row for one in found if one.made is kind for row in one.rows] for kind in (False, True))
        without_slices = all(one.noise is None for one in found)
        scalar = (worst is not None or without_slices) and all(one.scalar for one in found)
        return cls.of(given or made, worst, made=made if given else (), scalar=scalar)

    def judged(self, bound: str) -> float | None:
        """Return the number that the budget's ``bound`` applies to; ``None`` when this output has no such metric.

        That is a metric's mean, but the worst ``max_abs`` and ``slice_error`` and the total of ``nonfinite``; or the
        named quantile, as in ``relative_l2.p99``: for ``p99`` None with fewer than :data:`ROWS` samples.
        """
        metric, _, quantile = bound.partition(".")
        if quantile == "p99" and self.samples < ROWS:
            return None
        return self.stats.get(metric, {}).get(quantile or _JUDGED.get(metric, "mean"))

    def where(self, bound: str) -> str:
        """Return the part of the output that :meth:`judged` is about; "" for all of it."""
        stats = self.stats.get(bound, {})
        return f"index {stats['index']:.0f} of axis {stats['axis']:.0f}" if "axis" in stats else ""

    def as_dict(self) -> dict[str, dict[str, float]]:
        """Return ``stats`` as nested dictionaries, as the manifest keeps them."""
        return {metric: dict(stats) for metric, stats in self.stats.items()}


def _distribution(metric: str, values: list[float]) -> dict[str, float]:
    ordered = sorted(values, reverse=metric == "sqnr_db")  # from best to worst
    finite = [value for value in ordered if math.isfinite(value)]  # an exact sample's +inf dB would hide the others
    return {
        "mean": ordered[-1] if math.isinf(ordered[-1]) else float(np.mean(finite)),
        "p50": ordered[(len(ordered) - 1) // 2],
        "p99": ordered[math.ceil(0.99 * len(ordered)) - 1],
        "worst": ordered[-1],
    }
