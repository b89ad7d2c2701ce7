"""Confidence intervals contain the true value as often as they claim: checked by simulation with fixed seeds."""

import math

import numpy as np
import pytest

from bf16kit.drift.metrics import DriftSummary, SampleDrift
from bf16kit.service.drift import intervals
from bf16kit.service.drift.intervals import Values

DRAWS = 1000


def apart(n: int) -> np.ndarray:
    """Return the requests of ``n`` rows, each row in a request of its own."""
    return np.arange(n)


def test_the_effective_size_is_that_of_equal_weights_and_counts_requests() -> None:
    assert intervals.effective_size(np.ones(50), apart(50)) == 50
    assert intervals.effective_size(np.array([1.0, 1.0, 1e9]), apart(3)) == pytest.approx(1, abs=1e-6)
    assert intervals.effective_size(np.ones(80), np.arange(80) // 8) == 10
    assert intervals.effective_size(np.array([]), np.array([], np.int64)) == 0


@pytest.mark.parametrize(
    ("z", "freedom", "table"),
    [
        *[(intervals.Z, *each) for each in ((5, 2.5706), (9, 2.2622), (30, 2.0423), (1e6, 1.9600))],
        *[(intervals.Z_ALWAYS, *each) for each in ((7, 11.882), (20, 6.0292), (50, 5.0261), (1e6, 4.5))],
    ],
)
def test_students_t_equals_the_published_table_and_is_not_too_small_far_out(
    z: float, freedom: float, table: float
) -> None:
    """The values far out are scipy.stats.t.isf(scipy.stats.norm.sf(4.5), freedom)."""
    assert intervals.student(freedom, z) == pytest.approx(table, rel=2e-3 if z == intervals.Z else 0.025)
    assert intervals.student(freedom, z) >= table * (0.998 if z == intervals.Z else 0.9999)
    assert intervals.student(2.9, z) == math.inf


@pytest.mark.parametrize("spread", [0.1, 0.3])
@pytest.mark.parametrize("n", [20, 200])
@pytest.mark.parametrize("weights", ["equal", "halving", "kinds"])
def test_the_interval_of_a_mean_misses_it_on_each_side_as_seldom_as_it_claims(
    spread: float, n: int, weights: str
) -> None:
    rng = np.random.default_rng(n)
    below = above = 0
    for _ in range(DRAWS):
        values, of = _drawn(rng, spread, n, weights)
        truth = math.exp(spread**2 / 2) * ((1.5 + 4) / 5 if weights == "kinds" else 1)
        found = intervals.mean(values, of, apart(n), positive=True)
        below += found.high < truth
        above += found.low > truth
    assert above <= 0.035 * DRAWS  # 25 of 1000 are expected, 35 are two standard errors more
    assert below <= 0.05 * DRAWS  # drift is skewed: see decision 0054


def _drawn(rng: np.random.Generator, spread: float, n: int, weights: str) -> tuple[Values, Values]:
    values = np.exp(spread * rng.standard_normal(n))
    if weights == "equal":
        return values, np.ones(n)
    if weights == "halving":
        return values, np.exp2(-np.arange(n) / 200)
    rare = rng.random(n) < 0.5  # sampled four times as often as others, and with half more drift
    return np.where(rare, 1.5 * values, values), np.where(rare, 1.0, 4.0)


def test_rows_of_one_request_do_not_count_as_independent_ones() -> None:
    rng = np.random.default_rng(0)
    missed = 0
    for _ in range(DRAWS):
        requests = np.exp(0.3 * rng.standard_normal(25))
        found = intervals.mean(np.repeat(requests, 8), np.ones(200), np.arange(200) // 8, positive=True)
        missed += not found.low <= math.exp(0.045) <= found.high
    assert missed < 0.08 * DRAWS


def test_a_mean_without_spread_has_no_width_and_may_be_zero() -> None:
    for value in (0.0, 3e-3):
        found = intervals.mean(np.full(20, value), np.ones(20), apart(20), positive=True)
        assert tuple(found) == pytest.approx((value,) * 5)


def test_decibels_may_be_negative() -> None:
    found = intervals.mean(np.linspace(-3, 1, 30), np.ones(30), apart(30), positive=False)
    assert found.estimate == pytest.approx(-1)
    assert found.low < -1 < found.high < 0


@pytest.mark.parametrize("share", [0.5, 0.99])
def test_a_quantile_is_between_its_order_statistics_as_often_as_claimed(share: float) -> None:
    rng = np.random.default_rng(1)
    truth = {0.5: 0.0, 0.99: 2.3263479}[share]
    missed = 0
    for _ in range(DRAWS):
        found = intervals.quantile(rng.standard_normal(577), np.ones(577), share, 577.0)
        missed += not found.low <= truth <= found.high
    assert missed <= 0.065 * DRAWS


def test_a_quantile_of_weighted_samples_is_that_of_all_rows() -> None:
    rng, missed = np.random.default_rng(2), 0
    for _ in range(DRAWS):
        rare = rng.random(800) < 0.5
        values = np.where(rare, 3.0, 0.0) + rng.random(800)
        weights = np.where(rare, 1.0, 9.0)  # nine in ten rows are below 1, so that the median is 0.5555…
        found = intervals.quantile(values, weights, 0.5, intervals.effective_size(weights, apart(800)))
        missed += not found.low <= 0.5 / 0.9 <= found.high
    assert missed <= 0.065 * DRAWS


def test_few_draws_do_not_bound_a_high_quantile() -> None:
    assert intervals.ranks(367, 0.99)[1] == 368
    assert intervals.ranks(368, 0.99)[1] == 368
    low, high = intervals.ranks(20, 0.5)
    assert (low, high) == (6, 15)  # as in published tables
    assert intervals.quantile(np.arange(100.0), np.ones(100), 0.99, 100.0).high == math.inf
    assert intervals.quantile(np.arange(3.0), np.ones(3), 0.5, 3.0).low == -math.inf


def test_with_equal_weights_the_estimates_equal_the_converters() -> None:
    values = np.exp(np.random.default_rng(3).standard_normal(101))
    told = DriftSummary.of([SampleDrift(v, 0.0, 0.0, 0.0, 0, 0, 0) for v in values]).stats["relative_l2"]
    ones = np.ones(101)
    assert intervals.mean(values, ones, apart(101), positive=True).estimate == pytest.approx(told["mean"])
    assert intervals.quantile(values, ones, 0.5, 101).estimate == told["p50"]
    assert intervals.quantile(values, ones, 0.99, 101).estimate == told["p99"]


def test_full_agreement_of_few_samples_has_a_wide_interval() -> None:
    assert intervals.proportion(1.0, 10.0).low == pytest.approx(10 / (10 + intervals.Z**2))
    assert intervals.proportion(1.0, 10.0).high == 1
    assert intervals.proportion(0.0, 10.0).low == 0


def test_two_of_eight_rows_do_not_establish_a_share_and_four_do() -> None:
    """Of 1 % of the rows, there are two in eight with a chance of 0.3 %, and four with 7e-7."""
    assert intervals.proportion(6 / 8, 8.0).high < 0.99 < intervals.proportion(6 / 8, 8.0).highest
    assert intervals.proportion(4 / 8, 8.0).highest < 0.99
    assert intervals.proportion(2 / 8, 8.0).lowest < 0.01 < intervals.proportion(4 / 8, 8.0).lowest


@pytest.mark.parametrize("positive", [False, True])
def test_the_interval_of_a_single_request_is_practically_unlimited_and_never_nan(positive: bool) -> None:
    found = intervals.mean(np.array([50.0]), np.ones(1), np.array([3]), positive=positive)
    assert found.estimate == 50.0
    assert found.low < 1e-9
    assert found.high > 1e9
