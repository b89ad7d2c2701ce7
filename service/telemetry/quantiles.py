"""Percentiles from a histogram's buckets, computed like Prometheus' ``histogram_quantile``.

The true percentile is in the same bucket. With :data:`service.telemetry.families.SECONDS` the error is at most a
factor of 2.5. Means are exact, because they come from sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Durations:
    """Durations in seconds; None without observations. A percentile beyond the last bucket's bound is that bound."""

    count: int = 0
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


def durations(bounds: Sequence[float], cumulative: Counts, total: float) -> Durations:
    """Summarise a histogram.

    ``cumulative`` counts observations up to each bound, then all; ``total`` is their sum in seconds.
    """
    count = int(cumulative[-1])
    if not count:
        return Durations()
    p50, p90, p99 = (float(quantiles(bounds, cumulative[None], q)[0]) for q in (0.5, 0.9, 0.99))
    return Durations(count, total / count, p50, p90, p99)


def quantiles(bounds: Sequence[float], cumulative: Counts, q: float) -> Counts:
    """Return the ``q`` quantile of each row of ``cumulative`` [rows, buckets]; NaN for a row without counts."""
    count = cumulative[:, -1]
    rank = q * count
    at = np.minimum((cumulative < rank[:, None]).sum(axis=1), len(bounds) - 1)
    edges = np.array([0.0, *bounds])
    rows = np.arange(len(cumulative))
    below = np.where(at > 0, cumulative[rows, at - 1], 0.0)
    inside = cumulative[rows, at] - below
    share = np.clip(np.divide(rank - below, inside, out=np.ones_like(rank), where=inside > 0), 0.0, 1.0)
    low, high = edges[at], edges[at + 1]
    found: Counts = np.where(count > 0, low + (high - low) * share, np.nan)
    return found
