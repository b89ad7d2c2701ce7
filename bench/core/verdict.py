"""What repeated measurements say about a ratio: its value, an interval, and whether a goal is met, missed or neither.

Samples are seconds, by process, and in each process by turn. Turn i of one side and turn i of another were measured
right after each other, so their ratio is free of what slowed the machine down in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, median
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Verdict = Literal["met", "missed", "undecided"]
Turn = Sequence[float]  # seconds of runs that followed each other
Samples = Sequence[Sequence[Turn]]  # by process, by turn

FEWEST_PROCESSES = 5
_RESAMPLES = 4000
# Student's t at 0.975 by degrees of freedom; from ten on what ten has, which is only wider.
_T = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228}


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value, and the interval that it is in with a confidence of about 95 %."""

    value: float
    low: float
    high: float


def verdict(estimate: Estimate, *, at_least: float | None = None, at_most: float | None = None) -> Verdict:
    """Against a goal: met or missed when the whole interval is on one side of it, undecided otherwise."""
    if at_most is not None:
        at_least, estimate = -at_most, Estimate(-estimate.value, -estimate.high, -estimate.low)
    assert at_least is not None, "a verdict needs a goal"
    if estimate.low >= at_least:
        return "met"
    return "missed" if estimate.high < at_least else "undecided"  # an interval of NaN decides nothing


def typical(samples: Samples) -> float:
    """The median of the processes' medians over all their runs."""
    return median(median(seconds for turn in process for seconds in turn) for process in samples)


def ratio(above: Samples, below: Samples) -> Estimate:
    """How many times as long ``above`` takes as ``below``: the geometric mean over processes of the median over turns.

    The interval comes from resampling processes and, in each, its turns.
    """
    assert len(above) == len(below), "processes are paired"
    return estimate([_turns(*pair) for pair in zip(above, below, strict=True)])


def _turns(above: Sequence[Turn], below: Sequence[Turn]) -> NDArray[np.float64]:
    return np.array([median(a) / median(b) for a, b in zip(above, below, strict=True)])


def estimate(processes: Sequence[NDArray[np.float64]]) -> Estimate:
    """The geometric mean over ``processes`` of each one's median, with its interval.

    Few processes resampled vary too little, so the percentiles are those at which a normal variable is as far out as
    Student's t, with as many degrees of freedom, is at 95 % (Hesterberg's expanded percentile interval). Fewer than
    five processes tell nothing of their spread: the interval is then everything.
    """
    logs = [np.log(values) for values in processes]
    value = float(np.exp(np.mean([np.median(values) for values in logs])))
    if len(logs) < FEWEST_PROCESSES:
        return Estimate(value, 0.0, float("inf"))
    outside = 100 * _outside(len(logs))
    low, high = np.exp(np.percentile(_resampled(logs), [outside, 100 - outside]))
    return Estimate(value, float(low), float(high))


def _outside(count: int) -> float:
    """The share of resamples on either side that the interval leaves out."""
    widest = _T[min(count - 1, max(_T))]
    return 1 - NormalDist().cdf(widest * (count / (count - 1)) ** 0.5)


def _resampled(logs: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    generator = np.random.default_rng(0)
    medians = np.stack([_medians(values, generator) for values in logs])  # [process, resample]
    chosen = generator.integers(len(logs), size=(len(logs), _RESAMPLES))
    return np.asarray(np.take_along_axis(medians, chosen, axis=0).mean(axis=0))


def _medians(values: NDArray[np.float64], generator: np.random.Generator) -> NDArray[np.float64]:
    """Medians of ``values`` resampled."""
    drawn = generator.integers(len(values), size=(_RESAMPLES, len(values)))
    return np.asarray(np.median(values[drawn], axis=1))
