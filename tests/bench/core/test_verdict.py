"""What is judged from samples: a real difference is seen, noise decides nothing, the interval holds the truth."""

from __future__ import annotations

import numpy as np
import pytest

from bench.core.verdict import Estimate, Samples, ratio, typical, verdict

PROCESSES, TURNS, RUNS = 5, 6, 3


def sampled(generator: np.random.Generator, seconds: float, *, shared: np.ndarray, noise: float = 0.05) -> Samples:
    """Runs of ``seconds``, each process and each run a little off, ``shared`` being what slows both sides of a turn."""
    of_process = np.exp(generator.normal(0, 0.02, PROCESSES))
    runs = np.exp(generator.normal(0, noise, (PROCESSES, TURNS, RUNS)))
    found: list[list[list[float]]] = (seconds * of_process[:, None, None] * runs * shared[:, :, None]).tolist()
    return found


def calm() -> np.ndarray:
    return np.ones((PROCESSES, TURNS))


def test_a_side_that_is_a_third_slower_is_judged_so_on_a_machine_whose_speed_halves_meanwhile() -> None:
    generator = np.random.default_rng(1)
    weather = generator.uniform(1, 2, (PROCESSES, TURNS))
    found = ratio(sampled(generator, 1.3, shared=weather), sampled(generator, 1.0, shared=weather))
    assert found.value == pytest.approx(1.3, rel=0.05)
    assert verdict(found, at_least=1.1) == "met"
    assert verdict(found, at_least=1.5) == "missed"
    assert verdict(found, at_least=1.3) == "undecided"


def test_noise_decides_nothing() -> None:
    generator = np.random.default_rng(2)
    slow, fast = (sampled(generator, 1.0, shared=calm(), noise=0.6) for _ in range(2))
    assert verdict(ratio(slow, fast), at_least=1.05) == "undecided"
    assert verdict(ratio(slow, fast), at_most=0.95) == "undecided"


def test_what_differs_between_processes_counts_however_many_runs_each_made() -> None:
    """A thousand runs in a process that happened to be lucky are one observation."""
    above = [[[seconds] * 200] * 5 for seconds in (1.0, 1.4, 1.1, 1.3, 0.9)]
    below = [[[1.0] * 200] * 5 for _ in range(5)]
    found = ratio(above, below)
    assert found.high - found.low > 0.3
    assert verdict(found, at_least=1.05) == "undecided"


def bursts(generator: np.random.Generator) -> np.ndarray:
    """What neighbours do to one side: one turn in five takes up to several times as long."""
    hit = generator.random((PROCESSES, TURNS)) < 0.2
    return np.exp(hit * generator.exponential(0.5, (PROCESSES, TURNS)))


@pytest.mark.parametrize("disturbed", [False, True])
def test_the_interval_holds_the_truth_nine_times_in_ten_and_not_always(disturbed: bool) -> None:
    """One that always held it would be wider than it must be: it decided nothing that a narrower one could."""
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
    """Five medians, ln 1.1 apart: their mean, and 2.776 times its standard error on either side."""
    above = [[[1.1**step], [1.1**step * 0.5], [1.1**step * 7.0]] for step in range(5)]
    found = ratio(above, [[[1.0]] * 3] * 5)
    apart = 2.776 * np.log(1.1) * np.sqrt(2.5 / 5)
    assert found.value == pytest.approx(1.1**2)
    assert np.log([found.low, found.high]) == pytest.approx(np.log(1.1**2) + np.array([-apart, apart]))


def test_fewer_than_five_processes_decide_nothing() -> None:
    four = [[[2.0]]] * 4
    assert verdict(ratio(four, [[[1.0]]] * 4), at_least=1.1) == "undecided"


def test_turns_are_paired() -> None:
    """Taken apart, either side is anywhere between one and three seconds; turn by turn the ratio is two."""
    below = [[[1.0], [3.0], [2.0]]] * PROCESSES
    above = [[[2.0], [6.0], [4.0]]] * PROCESSES
    found = ratio(above, below)
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))


def test_what_one_side_has_beyond_the_other_has_no_pair() -> None:
    """Turns and processes that only one side has come after those that both have."""
    below = [[[1.0], [3.0], [9.0], [9.0]]] * (PROCESSES + 3)
    above = [[[2.0], [6.0]]] * PROCESSES
    assert ratio(above, below) == ratio(above, [[[1.0], [3.0]]] * PROCESSES)


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(0.9, 1.0, "met"), (1.01, 1.2, "missed"), (0.9, 1.1, "undecided")]
)
def test_a_goal_from_above(low: float, high: float, expected: str) -> None:
    assert verdict(Estimate(1.0, low, high), at_most=1.0) == expected


def test_an_interval_of_nan_decides_nothing() -> None:
    nan = float("nan")
    assert verdict(Estimate(nan, nan, nan), at_least=1.0) == "undecided"


def test_typical_is_the_median_of_processes() -> None:
    assert typical([[[1.0, 2.0], [3.0]], [[9.0]], [[4.0]]]) == 4.0
