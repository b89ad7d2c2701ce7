"""The change detector: whether live drift has become another than it was measured to be.

Page's CUSUM (E. S. Page, Biometrika 41, 1954) of log drift. Of each measured request the mean over its rows of

    g = clip(ln(drift) - centre, ±CLIP) - ALLOWANCE

is added up, never below 0, in units of θ, and the alarm is given at a sum of ln(HORIZON · outputs). θ is the positive
root of E[exp(θ g)] = 1 under the drift that was expected, for then Σ exp(θ · the sum since each request) - n is a
martingale (the Shiryaev-Roberts statistic; G. Lorden, Ann. Math. Stat. 42, 1971), and a false alarm comes on average
after HORIZON requests or later, whatever the shape of the distribution that has this root. A mean of dependent rows, a
weight below 1 and an upper bound on what one request adds all leave E[exp(…)] at 1 or below: the guarantee stays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from bf16kit.drift import TIE

WEEK = 604_800  # samples, at one a second
HORIZON = 10 * WEEK  # the mean distance of false alarms; ten times what is asked for, since the expected is estimated
DOUBLING = math.log(2)
ALLOWANCE = 0.6 * DOUBLING  # live drift may be 1.5 times what was expected for good
CLIP = math.log(64)
REQUESTS = 10  # that an alarm takes at least: none is given for a few odd requests
FEWEST = 16  # rows that a spread can be taken from
LEARN = 200  # rows from which it is learnt where the artifact has none
_LEAST_SPREAD = 0.05  # of log drift, standard deviation: MiniLM has 0.07
_HEAVY = ((0.9, 1.0), (0.1, 3.0))  # shares and spreads of Tukey's contaminated normal
_NORMAL = np.linspace(-9, 9, 721)
_DENSITY = np.exp(-np.square(_NORMAL) / 2)
_DENSITY /= _DENSITY.sum()
_MARGIN = 2.0  # standard errors by which the centre may have been estimated too low

Change = Literal["", "risen", "ended"]  # of the alarm


def log_drift(relative_l2: NDArray[np.float64]) -> NDArray[np.float64]:
    """What fp32 programs part by is no drift of bf16: below :data:`bf16kit.drift.TIE` all is the same. +inf stays."""
    return np.log(np.maximum(relative_l2, TIE))


@dataclass(frozen=True, slots=True)
class Expected:
    """Log drift as it is expected of an output: its centre and spread (a standard deviation), and the root θ."""

    centre: float
    spread: float
    root: float

    @classmethod
    def of(cls, relative_l2: Sequence[float], outputs: int = 1) -> Self | None:
        """From the drift of each row that was measured; None of fewer than :data:`FEWEST` finite ones, or where more
        than a tenth are not finite."""
        rows = np.asarray(relative_l2, np.float64)
        finite = log_drift(rows[np.isfinite(rows)])
        n = len(finite)
        if n < FEWEST or n < 0.9 * len(rows):
            return None
        spread = max(float(finite.std(ddof=1)) / math.sqrt(_chi_squared(n - 1) / (n - 1)), _LEAST_SPREAD)
        centre = float(finite.mean()) + _MARGIN * spread / math.sqrt(n)
        most = threshold(outputs) / (REQUESTS * (DOUBLING - ALLOWANCE))
        heavy = np.concatenate([width * spread * _NORMAL for _, width in _HEAVY])
        density = np.concatenate([share * _DENSITY for share, _ in _HEAVY])
        equal = np.full(n, 1.0 / n)
        root = min(_root(heavy, density, most), _root(finite - centre, equal, most))
        return cls(centre, spread, root)


def threshold(outputs: int) -> float:
    """The sum that gives the alarm, of each of so many outputs."""
    return math.log(HORIZON * max(1, outputs))


class Detector:
    """The sum of one output. ``learnt`` says that what is expected was learnt here, from live samples."""

    def __init__(self, expected: Expected | None, outputs: int = 1) -> None:
        self.expected = expected
        self.learnt = expected is None
        self.alarm = False
        self.since = 0  # requests since the sum was 0: the change, where there is one, is as old
        self.below = 0  # requests since the sum was at the threshold: so old is a change back
        self._outputs = outputs
        self._threshold = threshold(outputs)
        self._sum = 0.0
        self._clean: list[float] = []

    @property
    def score(self) -> float | None:
        """The sum ÷ the threshold; None while it is not known what to expect."""
        return None if self.expected is None else self._sum / self._threshold

    def restart(self) -> None:
        """Forget the sum and the alarm; what is expected stays."""
        self._sum, self.since, self.below, self.alarm = 0.0, 0, 0, False

    def add(self, relative_l2: Sequence[float], weight: float = 1.0, *, clean: bool = True) -> Change:
        """One request's rows; says whether they give the alarm or end it, which is when the sum is 0 again.

        ``weight``, in (0, 1], is what the request counts for. One that is not ``clean`` teaches nothing.
        """
        if self.expected is None:
            self._learn(relative_l2, clean)
            return ""
        away = np.clip(log_drift(np.asarray(relative_l2, np.float64)) - self.expected.centre, -CLIP, CLIP)
        step = self.expected.root * weight * (float(away.mean()) - ALLOWANCE)
        # What is above the threshold would only make the alarm outlive its cause.
        self._sum = min(max(0.0, self._sum + min(step, self._threshold / REQUESTS)), self._threshold)
        over = self._sum >= self._threshold * (1 - 1e-9)
        self.since = self.since + 1 if self._sum > 0 else 0
        self.below = 0 if over else self.below + 1
        change: Change = "" if self.alarm or not over else "risen"
        if self.alarm and self._sum == 0:
            change = "ended"
        self.alarm = over or (self.alarm and self._sum > 0)
        return change

    def _learn(self, relative_l2: Sequence[float], clean: bool) -> None:
        if clean:
            self._clean += relative_l2
        if len(self._clean) >= LEARN:
            self.expected = Expected.of(self._clean, self._outputs)
            self._clean.clear()


def _root(values: NDArray[np.float64], density: NDArray[np.float64], most: float) -> float:
    """θ in (0, ``most``] with E[exp(θ (clip(value) - ALLOWANCE))] = 1, or the largest for which it is not above 1."""
    steps = np.clip(values, -CLIP, CLIP) - ALLOWANCE

    def exceeds(root: float) -> bool:
        return float(np.dot(density, np.exp(root * steps))) > 1

    if not exceeds(most):
        return most
    low, high = 0.0, most
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if exceeds(middle) else (middle, high)
    return low


def _chi_squared(freedom: int) -> float:
    """Below which 5 % of a chi-squared distribution lie (E. B. Wilson, M. M. Hilferty, PNAS 17, 1931)."""
    part = 2 / (9 * freedom)
    return float(freedom * (1 - part - 1.6448536269514722 * math.sqrt(part)) ** 3)
