"""What repeated measurements say about a ratio: its value, an interval, and whether a goal is met, missed or neither.

Samples are seconds, by process, and in each process by turn. Turn i of one side and turn i of another were measured
right after each other, so their ratio is free of what slowed the machine down in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Verdict = Literal["met", "missed", "undecided"]
Turn = Sequence[float]  # seconds of runs that followed each other
Samples = Sequence[Sequence[Turn]]  # by process, by turn

FEWEST_PROCESSES = 5
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

    Where a side has fewer processes, or fewer turns in one, these are the first: what is beyond them has no pair.
    """
    return estimate([_turns(*pair) for pair in zip(above, below, strict=False)])


def _turns(above: Sequence[Turn], below: Sequence[Turn]) -> NDArray[np.float64]:
    return np.array([median(a) / median(b) for a, b in zip(above, below, strict=False)])


def estimate(processes: Sequence[NDArray[np.float64]]) -> Estimate:
    """The geometric mean over ``processes`` of each one's median, with Student's interval over these medians.

    A process is one observation, however many turns it has: its turns share its addresses, its pages and its hour. What
    turns differ by is in the medians already, so it is not counted once more. Fewer than five processes tell nothing of
    their spread: the interval is then everything.
    """
    medians = np.array([np.median(np.log(values)) for values in processes])
    value = float(np.exp(medians.mean()))
    apart = _apart(medians)
    return Estimate(value, float(value * np.exp(-apart)), float(value * np.exp(apart)))


def _apart(medians: NDArray[np.float64]) -> float:
    """Half of Student's interval about the mean of ``medians``."""
    if len(medians) < FEWEST_PROCESSES:
        return float("inf")
    return float(_T[min(len(medians) - 1, max(_T))] * medians.std(ddof=1) / len(medians) ** 0.5)
