"""The change detector in simulations with fixed seeds (docs/decisions/0054 has weeks of it), and the diagnosis."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from bf16kit.drift.metrics import SampleDrift
from bf16kit.drift.slices import FP32_NOISE
from bf16kit.service.drift.contract import Cause
from bf16kit.service.drift.detector import ALLOWANCE, CLIP, MIN_ROWS, REQUESTS, Detector, Expected, diagnose
from bf16kit.service.drift.recent import RecentRows

CENTRE = 4e-3  # MiniLM's
SPREADS = (0.07, 0.1, 0.3)  # MiniLM has 0.07 to 0.11


def drawn(rng: np.random.Generator, spread: float, count: int, factor: float = 1.0) -> NDArray[np.float64]:
    return CENTRE * factor * np.exp(spread * rng.standard_normal(count))


def calibrated(spread: float, seed: int = 0, count: int = 200) -> Expected:
    expected = Expected.of(list(drawn(np.random.default_rng(seed), spread, count)))
    assert expected is not None
    return expected


def samples_until_alarm(expected: Expected, drifts: NDArray[np.float64]) -> float:
    detector = Detector(expected)
    for count, drift in enumerate(drifts, 1):
        if detector.add([drift]) == "risen":
            return count
    return math.inf


@pytest.mark.parametrize("spread", SPREADS)
def test_a_doubling_is_seen_within_200_samples_and_a_corrupted_weight_within_50(spread: float) -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        assert samples_until_alarm(calibrated(spread, seed), drawn(rng, spread, 200, 2.0)) <= 200
        assert samples_until_alarm(calibrated(spread, seed), drawn(rng, spread, 50, 20.0)) <= 50


@pytest.mark.parametrize("spread", SPREADS)
def test_half_a_day_of_the_measured_drift_gives_no_alarm(spread: float) -> None:
    rng = np.random.default_rng(7)
    assert samples_until_alarm(calibrated(spread), drawn(rng, spread, 43_200)) == math.inf


def test_neither_heavier_tails_nor_lower_drift_nor_30_percent_more_give_an_alarm() -> None:
    rng = np.random.default_rng(8)
    heavy = CENTRE * np.exp(0.07 * rng.standard_t(3, 43_200))
    assert samples_until_alarm(calibrated(0.07), heavy) == math.inf
    for factor in (0.0, 0.1, 1.3):
        assert samples_until_alarm(calibrated(0.1), drawn(rng, 0.1, 5000, factor)) == math.inf


@pytest.mark.parametrize("spread", [0.01, 0.1, 0.5, 1.5])
def test_the_guarantee_holds_for_the_expected_drift_whatever_its_spread(spread: float) -> None:
    """E[exp(θ g)] ≤ 1 over the measured rows, and over rows whose logarithms are normal with the same spread."""
    found = calibrated(spread, seed=1, count=400)
    for seed, count in ((1, 400), (2, 100_000)):
        logs = np.log(drawn(np.random.default_rng(seed), spread, count))
        steps = np.clip(logs - found.centre, -CLIP, CLIP) - ALLOWANCE
        assert np.exp(found.root * steps).mean() <= 1 + 1e-6


def test_a_few_odd_requests_raise_no_alarm_however_odd_they_are() -> None:
    assert samples_until_alarm(calibrated(0.07), np.full(100, math.inf)) == REQUESTS


def test_an_output_that_was_exact_and_now_drifts_has_changed() -> None:
    exact = Expected.of([0.0] * 50)
    assert exact is not None
    assert samples_until_alarm(exact, np.full(100, FP32_NOISE / 2)) == math.inf
    assert samples_until_alarm(exact, np.full(100, 1e-3)) == REQUESTS


def test_rows_of_one_request_count_as_their_mean() -> None:
    one, many = (Detector(calibrated(0.3)) for _ in range(2))
    for _ in range(5):
        one.add([2 * CENTRE])
        many.add([CENTRE, 2 * CENTRE, 4 * CENTRE] * 3)
    assert many.score == pytest.approx(one.score)
    assert 0 < (many.score or 0) < 5 / REQUESTS  # no step was clipped


@pytest.mark.parametrize("rows", [[], [CENTRE] * (MIN_ROWS - 1), [CENTRE] * 50 + [math.inf] * 10])
def test_too_few_rows_or_many_infinite_ones_set_no_expectation(rows: list[float]) -> None:
    assert Expected.of(rows) is None


def test_the_spread_of_few_rows_is_estimated_larger_than_measured() -> None:
    few, many = calibrated(0.3, 6, MIN_ROWS), calibrated(0.3, 6, 5000)
    assert many.spread == pytest.approx(0.3, rel=0.05)
    of_few = np.log(drawn(np.random.default_rng(6), 0.3, MIN_ROWS)).std(ddof=1)
    assert few.spread == pytest.approx(of_few * math.sqrt(15 / 7.261), rel=1e-3)  # the chi-squared table's 5 %
    assert few.root < many.root


# --- the diagnosis: rows are (drift ÷ centre, elements that are not finite, weight) -----------------------------------

NARROW, WIDE = Expected(math.log(CENTRE), 0.1, 5.0), Expected(math.log(CENTRE), 1.0, 0.5)
SOUND, TWICE, FIVE, FAR, NAN = (1.0, 0, 1.0), (2.2, 0, 1.0), (5.0, 0, 1.0), (300.0, 0, 1.0), (math.inf, 3, 1.0)


@pytest.mark.parametrize(
    ("rows", "expected", "cause"),
    [
        ([SOUND] * 10, NARROW, "rounding"),
        ([TWICE] * 10, NARROW, "rounding"),
        ([FIVE] * 10, NARROW, "broken"),
        ([SOUND] * 9 + [FAR], NARROW, "broken"),  # few bad rows, but they are far off
        ([TWICE] * 6 + [FAR] * 4, NARROW, "rounding"),  # more than half of the bad rows are not far off
        ([SOUND] * 9 + [NAN], NARROW, "broken"),
        ([TWICE] * 9 + [NAN], NARROW, "broken"),
        ([TWICE, (300.0, 0, 100.0)], NARROW, "broken"),  # rows count by their weight
        ([(2.2, 0, 100.0), FAR], NARROW, "rounding"),
        ([FIVE] * 10, WIDE, "rounding"),
        ([(20.0, 0, 1.0)] * 10, WIDE, "rounding"),  # bad rows, but less than four spreads off
        ([FAR] * 10, WIDE, "broken"),
        ([FIVE] * 10, None, "rounding"),  # nothing is expected yet: only a lost output is broken
        ([FAR] * 10, None, "broken"),
        ([NAN], None, "broken"),
    ],
)
def test_the_cause_follows_the_documented_rules(
    rows: list[tuple[float, int, float]], expected: Expected | None, cause: Cause
) -> None:
    recent = RecentRows()
    for factor, bad, weight in rows:
        recent.add([SampleDrift(factor * CENTRE, 0.0, 0.0, 0.0, 0, 0, bad)], weight)
    assert diagnose(recent.window(), expected) == cause
