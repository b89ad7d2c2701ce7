"""Each bound's recent drift ÷ budget with its intervals, and whether it shows in the requests of one client alone.

The answer to a breach concerns all clients. A single one can send inputs whose drift is far over the budget, with
values that nearly overflow or cancel out, and the model of all others is sound. A client that sends over nine
tenths of the rows counts by itself: a few requests of others, as of a prober, say nothing about what it gets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from bf16kit.drift.metrics import Budget
from bf16kit.service.drift import intervals
from bf16kit.service.drift.intervals import Z_ALWAYS, Interval, Values, Z
from bf16kit.service.drift.recent import MIN_EFFECTIVE_SIZE, Window

_QUANTILES = {"p50": 0.5, "p99": 0.99}
_MOST_ROWS = 0.9  # share of the rows above which a client counts by itself


@dataclass(frozen=True, slots=True)
class Estimate:
    """One bound's drift ÷ budget (over 1 is a breach), its 95 % interval, and the lower end of its wide one.

    ``lowest`` over 1 establishes a breach although it is looked at after every sample
    (:mod:`bf16kit.service.drift.intervals`). ``confirmable``: so many samples can show that the bound is met.
    """

    metric: str
    ratio: float
    low: float
    high: float
    lowest: float
    confirmable: bool = True

    @property
    def within(self) -> bool:
        """Whether the bound is met: with 95 % confidence, or by the estimate if no such samples could confirm it.

        Otherwise a model whose requests differ much in size, so that samples are worth few, would never be within a
        budget that bounds a p99.
        """
        return self.high <= 1 or (not self.confirmable and self.ratio <= 1)


def estimates(window: Window, budget: Budget) -> Iterator[Estimate]:
    """Yield the estimate of every bound that the rows have a metric for, in the budget's order.

    ``.worst``, ``max_abs`` and ``nonfinite`` bound the measured rows themselves, so their intervals have no width. If
    none of n effective samples is over such a bound, at most 3 ÷ n of all answered rows are (with 95 % confidence).
    """
    for bound in budget.as_dict():
        found = _interval(window, bound)
        if found is not None:
            ratio, low, high, lowest, highest = (budget.ratio(bound, value) for value in _clipped(found, bound))
            high, low = max(low, high), min(low, high)
            confirmable = window.size < MIN_EFFECTIVE_SIZE or _is_confirmable(window, budget, bound, high)
            yield Estimate(bound, ratio, low, high, min(lowest, highest), confirmable)


def _is_confirmable(window: Window, budget: Budget, bound: str, high: float) -> bool:
    """Return whether so many samples, were all of them good, could show with 95 % confidence that the bound is met."""
    if bound == "top1_agreement":
        return budget.ratio(bound, intervals.wilson(1.0, window.size)[0]) <= 1
    return bound.partition(".")[2] not in _QUANTILES or math.isfinite(high)


def _interval(window: Window, bound: str) -> Interval | None:
    metric, _, part = bound.partition(".")
    if metric == "slice_error":
        return None  # of many rows together: see slice_estimate
    if metric == "nonfinite":
        return Interval.exact(float(window["nonfinite"].sum()))
    if metric == "top1_agreement":
        return _agreement(window)
    values = window[metric]
    if part == "worst" or (metric == "max_abs" and not part):
        return Interval.exact(float(values.min() if metric == "sqnr_db" else values.max()))
    if part:
        return _quantile(window, metric, _QUANTILES[part])
    return _mean(window, metric)


def _mean(window: Window, metric: str) -> Interval:
    """Return the mean as :class:`bf16kit.drift.metrics.DriftSummary` defines it.

    It is infinite if the worst value is. Rows of +inf dB, which are exact, are left out.
    """
    values = window[metric]
    floor = metric == "sqnr_db"
    worst = float(values.min() if floor else values.max())
    if math.isinf(worst):
        return Interval.exact(worst)
    finite = window.select(np.isfinite(values))
    values = finite[metric]
    if min(window.size, finite.size) < MIN_EFFECTIVE_SIZE:
        return Interval.unbounded(float(np.average(values, weights=finite.weights)))
    return intervals.mean(values, finite.weights, finite.clusters, positive=not floor)


def _quantile(window: Window, metric: str, share: float) -> Interval:
    sign = -1.0 if metric == "sqnr_db" else 1.0  # the quantile is taken on the bad side
    found = intervals.quantile(sign * window[metric], window.weights, share, max(window.size, 1.0))
    if window.size < MIN_EFFECTIVE_SIZE:
        found = Interval.unbounded(found.estimate)
    return Interval(*(sign * value for value in found))


def _agreement(window: Window) -> Interval | None:
    """Return the share of rows with the same top-1.

    The interval counts effective samples: rows of a request are dependent.
    """
    rows = float(np.dot(window.weights, window["top1_rows"]))
    if not rows:
        return None
    share = min(1.0, float(np.dot(window.weights, window["top1_matches"])) / rows)
    return intervals.proportion(share, window.size) if window.size >= MIN_EFFECTIVE_SIZE else Interval.unbounded(share)


def _clipped(found: Interval, bound: str) -> Interval:
    """Clip an interval at 0, because drift is never negative (decibels may be), and a share at 1."""
    if bound.startswith("sqnr_db"):
        return found
    highest = 1.0 if bound == "top1_agreement" else math.inf
    return Interval(*(min(max(0.0, value), highest) for value in found))


def slice_estimate(ratio: float, effective: float) -> Estimate:
    """Return the slice error's ``ratio`` to its bound with an interval for ``effective`` samples.

    A mean square over n requests has a relative standard error of √(2/n). The slice error is the root of a ratio of
    two, so the logarithm's is 1/√n. It is the largest of up to thousands of slices: the interval's lower end takes the
    4.5 standard errors of Z_ALWAYS, which chance exceeds in less than one of a hundred thousand.
    """
    if effective < MIN_EFFECTIVE_SIZE:
        least = -math.inf if ratio else 0.0
        return Estimate("slice_error", ratio, least, math.inf, least)
    spread = 1 / math.sqrt(effective)
    low = ratio * math.exp(-Z_ALWAYS * spread)
    return Estimate("slice_error", ratio, low, ratio * math.exp(Z * spread), low)


def corroborated(window: Window, budget: Budget, found: Sequence[Estimate]) -> list[Estimate]:
    """Return ``found``, where a breach that one client alone causes has 1 as its lower ends: it is undecided.

    It is that client's alone if others sent a tenth of the rows at least, and the estimate for these is within the
    budget. Bounds of which the window has no rows, those on slices, are left as they are.
    """
    if not any(each.low > 1 for each in found):
        return list(found)
    _, at = np.unique(window.clients, return_inverse=True)
    share = np.bincount(at, window.weights) / window.weights.sum()
    if not (share <= _MOST_ROWS).any():
        return list(found)
    without = lru_cache(lambda client: {e.metric: e.ratio for e in estimates(window.select(at != client), budget)})

    def judged(each: Estimate) -> Estimate:
        limit = budget.bound(each.metric)
        if each.low <= 1 or limit is None:
            return each
        # A breach that vanishes without any client vanishes without this one: the others' drift is least without it.
        worst = np.where(share > _MOST_ROWS, -np.inf, np.bincount(at, _excess(window, each.metric, limit))).argmax()
        if without(int(worst)).get(each.metric, math.inf) > 1:
            return each
        return replace(each, low=1.0, lowest=min(each.lowest, 1.0))

    return [judged(each) for each in found]


def _excess(window: Window, bound: str, limit: float) -> Values:
    """Return by how much each row raises the drift above ``limit``; negative if it lowers the drift."""
    metric, _, part = bound.partition(".")
    over: Values
    over = values = window["top1_rows" if metric == "top1_agreement" else metric]
    if metric == "nonfinite":
        return values
    if metric == "top1_agreement":
        over = values * limit - window["top1_matches"]
    elif metric == "sqnr_db":
        over = np.where(values == math.inf, 0.0, limit - values)
    else:
        over = values / limit - 1 if limit else values
    if part in _QUANTILES:
        over = np.where(over > 0, 1.0, 0.0) - (1 - _QUANTILES[part])
    elif part or metric == "max_abs":
        over = np.maximum(over, 0.0)
    return window.weights * over  # infinite where the model's output is and fp32's is not: that client is the worst
