"""Verdicts from samples: real differences are detected, noise decides nothing, intervals contain the true value."""

import math

import numpy as np
import pytest

from bench.core.verdict import Estimate, Samples, ratio, verdict

PROCESSES, TURNS, RUNS = 5, 6, 3


def sampled(generator: np.random.Generator, seconds: float, *, shared: np.ndarray, noise: float = 0.05) -> Samples:
    """Return runs of ``seconds`` with noise per process and per run. ``shared`` slows both sides of a turn."""
    of_process = np.exp(generator.normal(0, 0.02, PROCESSES))
    runs = np.exp(generator.normal(0, noise, (PROCESSES, TURNS, RUNS)))
    found: list[list[list[float]]] = (seconds * of_process[:, None, None] * runs * shared[:, :, None]).tolist()
    return found


def calm() -> np.ndarray:
    return np.ones((PROCESSES, TURNS))


def bursts(generator: np.random.Generator) -> np.ndarray:
    """Return factors that slow one side: one turn in five takes longer, up to several times as long."""
    hit = generator.random((PROCESSES, TURNS)) < 0.2
    return np.exp(hit * generator.exponential(0.5, (PROCESSES, TURNS)))


@pytest.mark.parametrize("disturbed", [False, True])
def test_the_interval_contains_the_true_ratio_in_90_to_99_percent_of_cases(disturbed: bool) -> None:
    """An interval that always contains it is too wide: a narrower one would decide more cases."""
    generator = np.random.default_rng(3)
    held = 0
    for _ in range(300):
        above, below = (
            sampled(generator, seconds, shared=bursts(generator) if disturbed else calm()) for seconds in (1.3, 1.0)
        )
        found = ratio(above, below)
        held += found.low <= 1.3 <= found.high
    assert 270 <= held <= 297


def test_the_interval_is_students_over_the_medians_of_processes() -> None:
    """For five medians ln 1.1 apart, it is their mean ± 2.776 times its standard error."""
    above = [[[1.1**step], [1.1**step * 0.5], [1.1**step * 7.0]] for step in range(5)]
    found = ratio(above, [[[1.0]] * 3] * 5)
    apart = 2.776 * np.log(1.1) * np.sqrt(2.5 / 5)
    assert found.value == pytest.approx(1.1**2)
    assert np.log([found.low, found.high]) == pytest.approx(np.log(1.1**2) + np.array([-apart, apart]))


def test_turns_are_paired() -> None:
    """Each side varies threefold between turns; within each turn, the ratio is two."""
    below = [[[1.0], [3.0], [2.0]]] * PROCESSES
    above = [[[2.0], [6.0], [4.0]]] * PROCESSES
    found = ratio(above, below)
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))
    assert verdict(ratio(above[:4], below[:4]), at_least=1.1) == "undecided"  # of fewer than five processes


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.9, 1.0, "met"), (1.01, 1.2, "missed"), (0.9, 1.1, "undecided"), (math.nan, math.nan, "undecided")],
)
def test_verdicts_on_an_upper_bound(low: float, high: float, expected: str) -> None:
    assert verdict(Estimate(1.0, low, high), at_most=1.0) == expected
