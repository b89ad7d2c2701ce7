"""Statistics of weighted samples with 95 % intervals: formulas only, each with its source.

Rows come in clusters, the rows of one request, which are not independent. Requests are sampled, not rows, so the size
of a sample is counted in requests. ``clusters`` gives each row's request, as integers from 0.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
Clusters = NDArray[np.int64]

Z = 1.959963984540054  # 97.5 % quantile of the normal distribution
_TAIL = 0.025


class Interval(NamedTuple):
    """An estimate and the ends of its 95 % interval."""

    estimate: float
    low: float
    high: float


def effective_size(weights: Values, clusters: Clusters) -> float:
    """Return (Σw)² / Σw², with w the weight of a whole request: the equivalent number of requests of equal weight.

    L. Kish, Survey Sampling (1965), 8.2. 0 without rows.
    """
    if not len(weights):
        return 0.0
    per_request = np.bincount(clusters, weights)
    return float(per_request.sum() ** 2 / np.square(per_request).sum())


def mean(values: Values, weights: Values, clusters: Clusters, *, positive: bool, size: float | None = None) -> Interval:
    """Return Hájek's mean Σwx/Σw with Student's interval. ``values`` must be finite, and of at least two requests.

    The variance is the linearised one of a ratio, Σ(Σw(x-m))² / (Σw)², the inner sum over the rows of a request (C.-E.
    Särndal, B. Swensson, J. Wretman, Model Assisted Survey Sampling (1992), 5.6 and 4.3). It is multiplied by n/(n-1)
    and has n-1 degrees of freedom, with n the effective size. The interval of a ``positive`` quantity is computed on
    the logarithm, by the delta method, because drift is skewed and never below 0. ``size`` is the effective size, if
    known.
    """
    total = weights.sum()
    centre = float(np.dot(weights, values) / total)
    if size is None:
        size = effective_size(weights, clusters)
    residuals = np.bincount(clusters, weights * (values - centre))
    error = math.sqrt(float(np.square(residuals).sum()) * size / max(size - 1, 1e-9)) / float(total)
    t_quantile = student(size - 1)
    # Infinite even for an error of 0: so few samples do not establish it.
    half_width = t_quantile * error if math.isfinite(t_quantile) else math.inf
    if not positive:
        return Interval(centre, centre - half_width, centre + half_width)
    if centre <= 0 or half_width == 0:
        return Interval(centre, centre, centre)
    factor = math.exp(min(half_width / centre, 700.0))
    return Interval(centre, centre / factor, centre * factor)


def student(freedom: float) -> float:
    """Return the 97.5 % quantile of Student's t, by Fisher and Cornish's expansion (Abramowitz and Stegun 26.7.5).

    The expansion is 0.1 % off at five degrees of freedom. Below three it does not hold, and the result is infinite.
    """
    if freedom < 3:
        return math.inf
    z, v = Z, freedom
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )


def quantile(values: Values, weights: Values, share: float, size: float) -> Interval:
    """Return the smallest value with ``share`` of the weight at or below it, and an interval from order statistics.

    The number of n draws below a quantile is binomial (W. R. Thompson, Ann. Math. Stat. 7, 1936). With weights, ranks
    become shares of the weight, and n the effective ``size`` (R. S. Woodruff, J. Am. Stat. Assoc. 47, 1952). The upper
    end is infinite if there are too few draws to bound it: below 368 for ``p99``.
    """
    order = np.argsort(values)
    ordered, below = values[order], np.cumsum(weights[order])
    below /= below[-1]

    def at(rank: float) -> float:
        return float(ordered[min(len(ordered) - 1, int(np.searchsorted(below, rank - 1e-9)))])

    n = int(size)
    low, high = ranks(n, share)
    return Interval(at(share), at(low / n) if low else -math.inf, at(high / n) if high <= n else math.inf)


@lru_cache(maxsize=2048)
def ranks(n: int, share: float) -> tuple[int, int]:
    """Return the ranks, from 1, of the two order statistics of ``n`` draws that enclose the ``share`` quantile with 95
    %.

    An end that the draws do not bound is 0 or ``n`` + 1.
    """
    below, low, high = 0.0, 0, n + 1
    for k in range(n):
        below += math.exp(_log_binomial(n, k, share))
        if below <= _TAIL:
            low = k + 1
        if below >= 1 - _TAIL:
            high = k + 1
            break
    return low, high


def _log_binomial(n: int, k: int, share: float) -> float:
    choices = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return choices + k * math.log(share) + (n - k) * math.log1p(-share)


def wilson(share: float, size: float) -> Interval:
    """Return a share counted in ``size`` independent samples, with its score interval.

    E. B. Wilson, J. Am. Stat. Assoc. 22, 1927. An end is exactly 0 or 1 if the share is.
    """
    squared = Z * Z / size
    spread = Z * math.sqrt(share * (1 - share) / size + squared / (4 * size))
    centre = share + squared / 2
    low = (centre - spread) / (1 + squared) if share > 0 else 0.0
    high = (centre + spread) / (1 + squared) if share < 1 else 1.0
    return Interval(share, low, high)


def median(values: Values, weights: Values) -> float:
    """Return the smallest value with half of the weight at or below it."""
    order = np.argsort(values)
    below = np.cumsum(weights[order])
    return float(values[order][int(np.searchsorted(below, below[-1] / 2))])
