"""The change detector decides whether live drift has risen above what conversion measured; the diagnosis says why.

The detector is Page's CUSUM (E. S. Page, Biometrika 41, 1954) of log drift. For each measured request, the mean over
its rows of

    g = clip(ln(drift) - centre, ±CLIP) - ALLOWANCE

is added to a sum, in units of θ; the sum never falls below 0. The alarm is given when the sum reaches ln(HORIZON ·
outputs).

θ is the positive root of E[exp(θ g)] = 1 under the expected drift. With it, Σ exp(θ · the sum since each request) - n
is a martingale (the Shiryaev-Roberts statistic; G. Lorden, Ann. Math. Stat. 42, 1971). The mean time to a false alarm
is therefore at least HORIZON requests, whatever the shape of the distribution with this root. Taking the mean of
dependent rows or an upper bound on one request's step keeps E[exp(…)] at or below 1, and so keeps the guarantee.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from bf16kit.artifact.entries import drawn_at_random
from bf16kit.artifact.manifest import Manifest
from bf16kit.drift.measurements import InputRange, Measurements
from bf16kit.drift.slices import FP32_NOISE, Scales
from bf16kit.service.drift.contract import Cause
from bf16kit.service.drift.intervals import quantile
from bf16kit.service.drift.recent import Window

WEEK = 604_800  # samples, at one a second
HORIZON = 10 * WEEK  # mean time to a false alarm; ten times the requirement: the expected drift is an estimate
DOUBLING = math.log(2)
ALLOWANCE = 0.6 * DOUBLING  # live drift may stay at 1.5 times the expected drift without an alarm
CLIP = math.log(64)
REQUESTS = 10  # fewest requests that can give an alarm: a few odd ones must not
MIN_ROWS = 16  # fewest rows to estimate a spread from
LEARNING_ROWS = 200  # rows to learn the expected drift from if the artifact has none
_MIN_SPREAD = 0.05  # standard deviation of log drift; MiniLM has 0.07
_HEAVY = ((0.9, 1.0), (0.1, 3.0))  # shares and spreads of Tukey's contaminated normal
_NORMAL = np.linspace(-9, 9, 721)
_DENSITY = np.exp(-np.square(_NORMAL) / 2)
_DENSITY /= _DENSITY.sum()
_MARGIN = 2.0  # standard errors added to the centre, in case the estimate is too low

BROKEN = 4.0  # times the expected drift
LOST = 0.3  # drift that leaves little of an output
_WORST_FIRST: tuple[Cause, ...] = ("broken", "rounding", "none")

Change = Literal["", "risen", "ended"]  # of the alarm


def log_drift(relative_l2: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ln(relative_l2), with values below :data:`bf16kit.drift.slices.FP32_NOISE` raised to it first.

    Two fp32 programs also differ by as much, so a smaller difference is not bf16 drift. +inf stays +inf.
    """
    return np.log(np.maximum(relative_l2, FP32_NOISE))


@dataclass(frozen=True, slots=True)
class Expected:
    """The expected log drift of one output: its centre, its spread (a standard deviation) and the root θ."""

    centre: float
    spread: float
    root: float

    @classmethod
    def of(cls, relative_l2: Sequence[float], outputs: int = 1) -> Self | None:
        """Estimate the expected log drift from the measured relative_l2 of each row.

        Returns None if fewer than :data:`MIN_ROWS` rows are finite, or if more than a tenth are not finite.
        """
        rows = np.asarray(relative_l2, np.float64)
        finite = log_drift(rows[np.isfinite(rows)])
        n = len(finite)
        if n < MIN_ROWS or n < 0.9 * len(rows):
            return None
        spread = max(float(finite.std(ddof=1)) / math.sqrt(_chi_squared(n - 1) / (n - 1)), _MIN_SPREAD)
        centre = float(finite.mean()) + _MARGIN * spread / math.sqrt(n)
        max_root = threshold(outputs) / (REQUESTS * (DOUBLING - ALLOWANCE))
        heavy = np.concatenate([width * spread * _NORMAL for _, width in _HEAVY])
        density = np.concatenate([share * _DENSITY for share, _ in _HEAVY])
        equal = np.full(n, 1.0 / n)
        root = min(_root(heavy, density, max_root), _root(finite - centre, equal, max_root))
        return cls(centre, spread, root)


@dataclass(frozen=True, slots=True)
class Calibration:
    """What an artifact's conversion measured.

    ``rows``: the drift of each measured sample, by profile and output: max_abs for ``scalars`` (outputs of one
    number per row), else relative_l2. ``ranges``: the input ranges, by input name.

    Both are empty if the samples were random: live inputs do not resemble random ones. ``missing_reason`` explains why
    something is missing. ``scales``: how much each slice of an output varied over the samples, by output; empty for
    artifacts before schema version 7. ``infinite``: outputs whose reference is not finite in the golden samples, as of
    a model that masks.
    """

    rows: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    ranges: Mapping[str, InputRange] = field(default_factory=dict)
    missing_reason: str = "its artifact keeps no measurements"
    scales: Mapping[str, Scales] = field(default_factory=dict)
    infinite: frozenset[str] = frozenset()
    scalars: frozenset[str] = frozenset()

    @classmethod
    def of(cls, manifest: Manifest, measurements: Measurements | None) -> Calibration:
        """Return the calibration of an artifact.

        ``measurements`` is None for an artifact older than measurements are.
        """
        if measurements is None:
            return cls()
        usable = {profile for profile, entry in manifest.drift.items() if not drawn_at_random(entry.source)}
        measured = [each for entry in manifest.drift.values() for each in entry.outputs.items()]
        scalars = frozenset(output for output, stats in measured if "relative_l2" not in stats)
        if not usable:
            return cls(missing_reason="it was measured on random inputs", scalars=scalars)
        rows = {
            profile: {
                output: columns.max_abs if output in scalars else columns.relative_l2
                for output, columns in entry.outputs.items()
            }
            for profile, entry in measurements.profiles.items()
            if profile in usable
        }
        return cls(rows, measurements.inputs, "too few samples were measured", scalars=scalars)


def threshold(outputs: int) -> float:
    """Return the sum at which the detector of each of ``outputs`` outputs gives the alarm."""
    return math.log(HORIZON * max(1, outputs))


class Detector:
    """The CUSUM of one output. Without ``expected`` drift, it is learnt from live samples."""

    def __init__(self, expected: Expected | None, outputs: int = 1) -> None:
        self.expected = expected
        self.alarm = False
        self.change_age = 0  # requests since the sum was last 0, which is the age of a change
        self.recovery_age = 0  # requests since the sum was last at the threshold, which is the age of a change back
        self._outputs = outputs
        self._threshold = threshold(outputs)
        self._sum = 0.0
        self._learning: list[float] = []

    @property
    def score(self) -> float | None:
        """The sum ÷ the threshold; None until the expected drift is known."""
        return None if self.expected is None else self._sum / self._threshold

    def restart(self) -> None:
        """Forget the sum and the alarm. The expected drift is kept."""
        self._sum, self.change_age, self.recovery_age, self.alarm = 0.0, 0, 0, False

    def add(self, relative_l2: Sequence[float], *, within_budget: bool = True) -> Change:
        """Add one request's rows. Return "risen" if they give the alarm, "ended" if the sum is 0 again, else "".

        A request that is not ``within_budget`` is not learnt from.
        """
        if self.expected is None:
            self._learn(relative_l2, within_budget)
            return ""
        deviation = np.clip(log_drift(np.asarray(relative_l2, np.float64)) - self.expected.centre, -CLIP, CLIP)
        step = self.expected.root * (float(deviation.mean()) - ALLOWANCE)
        # A sum above the threshold would only keep the alarm up after its cause has ended.
        self._sum = min(max(0.0, self._sum + min(step, self._threshold / REQUESTS)), self._threshold)
        over = self._sum >= self._threshold * (1 - 1e-9)
        self.change_age = self.change_age + 1 if self._sum > 0 else 0
        self.recovery_age = 0 if over else self.recovery_age + 1
        change: Change = "" if self.alarm or not over else "risen"
        if self.alarm and self._sum == 0:
            change = "ended"
        self.alarm = over or (self.alarm and self._sum > 0)
        return change

    def _learn(self, relative_l2: Sequence[float], within_budget: bool) -> None:
        if within_budget:
            self._learning += relative_l2
        if len(self._learning) >= LEARNING_ROWS:
            self.expected = Expected.of(self._learning, self._outputs)
            self._learning.clear()


def diagnose(window: Window, expected: Expected | None, metric: str = "relative_l2") -> Cause:
    """Return the cause for an output that is over budget or has changed, by rules that a person can follow.

    A bad row drifts clearly more than expected, by at least a factor of 2 and by at least two spreads, or its output is
    not finite.

    1. ``broken``: an output is not finite; or half of the bad rows' weight drifts at least :data:`BROKEN` times the
       expected drift and at least four spreads more. Rounding to bf16 costs about one bit in some rows; it does not
       cost two bits in row after row. If no drift is expected yet, the limit is a drift of :data:`LOST`.
    2. ``rounding``: everything else. The noise is of the measured kind, but more than allowed, or than before.

    ``window`` holds at least one row: those since the change, or all recent ones. ``metric`` is what is ``expected``.
    The third cause, ``out_of_range``, is that of requests that are judged apart
    (:mod:`bf16kit.service.drift.comparison`).
    """
    drift, weights = log_drift(window[metric if expected else "relative_l2"]), window.weights
    centre, spread = (expected.centre, expected.spread) if expected else (math.log(LOST), 0.0)
    nonfinite = window["nonfinite"] > 0
    bad = nonfinite | (drift > centre + max(DOUBLING if expected else 0.0, 2 * spread))
    if not bad.any():
        return "rounding"
    broken = centre + max(math.log(BROKEN) if expected else 0.0, 4 * spread)
    if nonfinite.any() or quantile(drift[bad], weights[bad], 0.5, 1.0).estimate >= broken:
        return "broken"
    return "rounding"


def worst_cause(causes: list[Cause]) -> Cause:
    """Return the worst cause of several outputs; "none" without any."""
    return min(causes, key=_WORST_FIRST.index, default="none")


def _root(values: NDArray[np.float64], density: NDArray[np.float64], max_root: float) -> float:
    """Return θ in (0, ``max_root``] with E[exp(θ (clip(value) - ALLOWANCE))] = 1.

    Returns ``max_root`` if the expectation stays at or below 1.
    """
    steps = np.clip(values, -CLIP, CLIP) - ALLOWANCE

    def exceeds(root: float) -> bool:
        return float(np.dot(density, np.exp(root * steps))) > 1

    if not exceeds(max_root):
        return max_root
    low, high = 0.0, max_root
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if exceeds(middle) else (middle, high)
    return low


def _chi_squared(freedom: int) -> float:
    """Return the 5 % quantile of a chi-squared distribution (E. B. Wilson, M. M. Hilferty, PNAS 17, 1931)."""
    part = 2 / (9 * freedom)
    return float(freedom * (1 - part - 1.6448536269514722 * math.sqrt(part)) ** 3)
