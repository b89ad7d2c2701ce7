"""Statistics of weighted samples, with 95 % intervals: formulas alone, each with its source.

Rows come in clusters, the rows of one request, which are not independent of each other: what is sampled is requests,
and a sample's size is counted in them. ``clusters`` says of every row which request it is of, as integers from 0.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
Clusters = NDArray[np.int64]

Z = 1.959963984540054  # of a normal distribution, 2.5 % lie above
_TAIL = 0.025


class Interval(NamedTuple):
    """An estimate and the ends of its 95 % interval."""

    estimate: float
    low: float
    high: float


def effective_size(weights: Values, clusters: Clusters) -> float:
    """(Σw)² / Σw², w the weight of a whole request: how many requests of one weight tell as much.

    L. Kish, Survey Sampling (1965), 8.2. 0 without rows.
    """
    if not len(weights):
        return 0.0
    whole = np.bincount(clusters, weights)
    return float(whole.sum() ** 2 / np.square(whole).sum())


def mean(values: Values, weights: Values, clusters: Clusters, *, positive: bool, size: float | None = None) -> Interval:
    """Hájek's mean Σwx/Σw and Student's interval of it; of finite values, and of at least two requests.

    The variance is the linearised one of a ratio, Σ(Σw(x-m))² / (Σw)², the inner sum over the rows of a request (C.-E.
    Särndal, B. Swensson, J. Wretman, Model Assisted Survey Sampling (1992), 5.6 and 4.3), times n/(n-1) and with n-1
    degrees of freedom, n the effective size. What is ``positive`` has its interval on the logarithm, by the delta
    method: drift is skewed, and none is below 0. ``size`` is the effective size where it is known already.
    """
    total = weights.sum()
    centre = float(np.dot(weights, values) / total)
    if size is None:
        size = effective_size(weights, clusters)
    residuals = np.bincount(clusters, weights * (values - centre))
    error = math.sqrt(float(np.square(residuals).sum()) * size / max(size - 1, 1e-9)) / float(total)
    freedom = student(size - 1)
    reach = freedom * error if math.isfinite(freedom) else math.inf  # of no error, too: so few say nothing of it
    if not positive:
        return Interval(centre, centre - reach, centre + reach)
    if centre <= 0 or reach == 0:
        return Interval(centre, centre, centre)
    factor = math.exp(min(reach / centre, 700.0))
    return Interval(centre, centre / factor, centre * factor)


def student(freedom: float) -> float:
    """Student's t, 97.5 % below, by Fisher and Cornish's expansion (Abramowitz and Stegun 26.7.5), which is 0.1 % off
    at five degrees of freedom; infinite below three, where it does not hold."""
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
    """The smallest value with ``share`` of the weight at or below it, and order statistics about it.

    How many of n draws lie below a quantile is binomial (W. R. Thompson, Ann. Math. Stat. 7, 1936); with weights the
    ranks become shares of the weight and n the effective ``size`` (R. S. Woodruff, J. Am. Stat. Assoc. 47, 1952). The
    upper end is infinite where so few draws do not bound it: of ``p99`` below 368.
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
    """The ranks, from 1, of the order statistics of ``n`` draws that the quantile of ``share`` lies between with 95 %;
    0 and ``n`` + 1 for an end that the draws do not bound."""
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
    """A share that was counted in ``size`` independent samples, and its score interval (E. B. Wilson, J. Am. Stat.
    Assoc. 22, 1927). An end is 0 or 1 exactly where the share is."""
    squared = Z * Z / size
    spread = Z * math.sqrt(share * (1 - share) / size + squared / (4 * size))
    centre = share + squared / 2
    low = (centre - spread) / (1 + squared) if share > 0 else 0.0
    high = (centre + spread) / (1 + squared) if share < 1 else 1.0
    return Interval(share, low, high)


def median(values: Values, weights: Values) -> float:
    """The smallest value with half of the weight at or below it."""
    order = np.argsort(values)
    below = np.cumsum(weights[order])
    return float(values[order][int(np.searchsorted(below, below[-1] / 2))])
