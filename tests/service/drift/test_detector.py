"""The change detector in simulations with fixed seeds; docs/decisions/0054 has weeks of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from bf16kit.drift.slices import FP32_NOISE
from service.drift.detector import (
    ALLOWANCE,
    CLIP,
    HORIZON,
    MIN_ROWS,
    REQUESTS,
    Detector,
    Expected,
    threshold,
)

CENTRE = 4e-3  # MiniLM's
SPREADS = (0.07, 0.1, 0.3)  # MiniLM has 0.07 to 0.11


def drawn(rng: np.random.Generator, spread: float, count: int, factor: float = 1.0) -> NDArray[np.float64]:
    return CENTRE * factor * np.exp(spread * rng.standard_normal(count))


def calibrated(spread: float, seed: int = 0) -> Expected:
    expected = Expected.of(list(drawn(np.random.default_rng(seed), spread, 200)))
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


def test_rows_with_heavier_tails_than_those_measured_give_no_alarm() -> None:
    rng = np.random.default_rng(8)
    heavy = CENTRE * np.exp(0.07 * rng.standard_t(3, 43_200))
    assert samples_until_alarm(calibrated(0.07), heavy) == math.inf


def test_the_guarantee_holds_for_the_expected_drift_whatever_its_spread() -> None:
    """E[exp(θ g)] ≤ 1 over the measured rows, and over rows whose logarithms are normal with the same spread."""
    for spread in (0.01, 0.1, 0.5, 1.5):
        rows = drawn(np.random.default_rng(1), spread, 400)
        found = Expected.of(list(rows))
        assert found is not None
        for sample in (rows, drawn(np.random.default_rng(2), spread, 100_000)):
            steps = np.clip(np.log(sample) - found.centre, -CLIP, CLIP) - ALLOWANCE
            assert np.exp(found.root * steps).mean() <= 1 + 1e-6


def test_a_few_odd_requests_raise_no_alarm_however_odd_they_are() -> None:
    detector = Detector(calibrated(0.07))
    for _ in range(REQUESTS - 1):
        assert detector.add([math.inf]) == ""
    assert detector.add([math.inf]) == "risen"


def test_an_alarm_stays_until_drift_was_as_expected_for_a_while() -> None:
    rng = np.random.default_rng(3)
    detector = Detector(calibrated(0.1))
    heard = [detector.add([drift]) for drift in drawn(rng, 0.1, 300, 2.0)]
    assert (heard.count("risen"), detector.alarm) == (1, True)
    assert detector.score == pytest.approx(1)
    after = [detector.add([drift]) for drift in drawn(rng, 0.1, 60)]
    assert (after.count("ended"), detector.alarm) == (1, False)
    assert 2 < after.index("ended") < 40


def test_lower_drift_is_not_a_change_and_neither_is_30_percent_more() -> None:
    rng = np.random.default_rng(5)
    for factor in (0.0, 0.1, 1.3):
        assert samples_until_alarm(calibrated(0.1), drawn(rng, 0.1, 5000, factor)) == math.inf


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
    few, many = (Expected.of(list(drawn(np.random.default_rng(6), 0.3, n))) for n in (MIN_ROWS, 5000))
    assert few is not None
    assert many is not None
    assert many.spread == pytest.approx(0.3, rel=0.05)
    of_few = np.log(drawn(np.random.default_rng(6), 0.3, MIN_ROWS)).std(ddof=1)
    assert few.spread == pytest.approx(
        of_few * math.sqrt(15 / 7.261), rel=1e-3
    )  # from the chi-squared table, 5 % below
    assert few.root < many.root


def test_more_outputs_have_a_higher_threshold_each() -> None:
    assert threshold(1) == pytest.approx(math.log(HORIZON))
    assert threshold(4) - threshold(1) == pytest.approx(math.log(4))
