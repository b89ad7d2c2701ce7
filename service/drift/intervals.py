"""Statistics of weighted samples with intervals: formulas only, each with its source.

Each interval has two widths. The narrow one holds with 95 % at any one look: people read it. The wide one, of
:data:`Z_ALWAYS` standard errors, is for decisions that are made anew after every sample (docs/decisions/0054 has the
simulated rates of false ones).

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
Z_ALWAYS = 4.5  # 99.9997 %
Z_RANKS = 4.75  # the same of quantiles: by unequal weights, ranks vary more than a binomial does


class Interval(NamedTuple):
    """An estimate, the ends of its 95 % interval, and those of the wide interval around that."""

    estimate: float
    low: float
    high: float
    lowest: float
    highest: float

    @classmethod
    def exact(cls, value: float) -> Interval:
        """Return the interval of a value that is known."""
        return cls(value, value, value, value, value)

    @classmethod
    def unbounded(cls, estimate: float) -> Interval:
        """Return the interval of an estimate of which too few samples were taken."""
        return cls(estimate, -math.inf, math.inf, -math.inf, math.inf)


def effective_size(weights: Values, clusters: Clusters) -> float:
    """Return (Σw)² / Σw², with w the weight of a whole request: the equivalent number of requests of equal weight.

    L. Kish, Survey Sampling (1965), 8.2. 0 without rows.
    """
    if not len(weights):
        return 0.0
    per_request = np.bincount(clusters, weights)
    return float(per_request.sum() ** 2 / np.square(per_request).sum())


def mean(values: Values, weights: Values, clusters: Clusters, *, positive: bool) -> Interval:
    """Return Hájek's mean Σwx/Σw with Student's interval. ``values`` must be finite, and of at least two requests.

    The variance is the linearised one of a ratio, Σ(Σw(x-m))² / (Σw)², the inner sum over the rows of a request (C.-E.
    Särndal, B. Swensson, J. Wretman, Model Assisted Survey Sampling (1992), 5.6 and 4.3). It is multiplied by n/(n-1)
    and has n-1 degrees of freedom, with n the effective size. The interval of a ``positive`` quantity is computed on
    the logarithm, by the delta method, because drift is skewed and never below 0.
    """
    total = weights.sum()
    centre = float(np.dot(weights, values) / total)
    size = effective_size(weights, clusters)
    residuals = np.bincount(clusters, weights * (values - centre))
    error = math.sqrt(float(np.square(residuals).sum()) * size / max(size - 1, 1e-9)) / float(total)

    def ends(z: float) -> tuple[float, float]:
        t_quantile = student(size - 1, z)
        # Infinite even for an error of 0: so few samples do not establish it.
        half_width = t_quantile * error if math.isfinite(t_quantile) else math.inf
        if not positive:
            return centre - half_width, centre + half_width
        if centre <= 0 or half_width == 0:
            return centre, centre
        factor = math.exp(min(half_width / centre, 700.0))
        return centre / factor, centre * factor

    return Interval(centre, *ends(Z), *ends(Z_ALWAYS))


def student(freedom: float, z: float = Z) -> float:
    """Return the quantile of Student's t at the level of the normal quantile ``z``.

    D. P. Gaver, K. Kafadar, Am. Stat. 38, 1984. At seven degrees of freedom, few for an interval here, it is 0.03 % too
    small for :data:`Z` and 2 % too large for :data:`Z_ALWAYS`. Below three the result is infinite.
    """
    if freedom < 3:
        return math.inf
    return math.sqrt(freedom * math.expm1(z * z * (freedom - 1.5) / (freedom - 1) ** 2))


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

    def ends(z: float) -> tuple[float, float]:
        low, high = ranks(n, share, z)
        return at(low / n) if low else -math.inf, at(high / n) if high <= n else math.inf

    return Interval(at(share), *ends(Z), *ends(Z_RANKS))


@lru_cache(maxsize=4096)
def ranks(n: int, share: float, z: float = Z) -> tuple[int, int]:
    """Return the ranks, from 1, of the two order statistics of ``n`` draws that enclose the ``share`` quantile at the
    level of the normal quantile ``z``.

    An end that the draws do not bound is 0 or ``n`` + 1.
    """
    tail = _tail(z)
    below, low, high = 0.0, 0, n + 1
    for k in range(n):
        below += math.exp(_log_binomial(n, k, share))
        if below <= tail:
            low = k + 1
        if below >= 1 - tail:
            high = k + 1
            break
    return low, high


def _tail(z: float) -> float:
    """Return the share of the normal distribution above ``z``."""
    return math.erfc(z / math.sqrt(2)) / 2


def _log_binomial(n: int, k: int, share: float) -> float:
    choices = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return choices + k * math.log(share) + (n - k) * math.log1p(-share)


def proportion(share: float, size: float) -> Interval:
    """Return a share counted in ``size`` independent samples, with its intervals.

    The narrow one is that of :func:`wilson`. From few samples a score interval as wide as the other would claim too
    much, so that one has the p with size · KL(share, p) <= -ln(tail) (H. Chernoff, Ann. Math. Stat. 23, 1952).
    """
    low, high = wilson(share, size)
    lowest, highest = _chernoff(share, size), 1 - _chernoff(1 - share, size)
    return Interval(share, low, high, min(low, lowest), max(high, highest))


def wilson(share: float, size: float) -> tuple[float, float]:
    """Return the ends of a share's 95 % score interval (E. B. Wilson, J. Am. Stat. Assoc. 22, 1927).

    An end is exactly 0 or 1 if the share is.
    """
    squared = Z * Z / size
    spread = Z * math.sqrt(share * (1 - share) / size + squared / (4 * size))
    centre = share + squared / 2
    low = (centre - spread) / (1 + squared) if share > 0 else 0.0
    high = (centre + spread) / (1 + squared) if share < 1 else 1.0
    return low, high


def _chernoff(share: float, size: float) -> float:
    """Return the lower end of a share's wide interval, by bisection."""
    most = -math.log(_tail(Z_ALWAYS)) / size

    def divergence(p: float) -> float:
        return sum(q * math.log(q / r) for q, r in ((share, p), (1 - share, 1 - p)) if q > 0)

    low, high = 0.0, share
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if middle > 0 and divergence(middle) <= most else (middle, high)
    return low
