from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.telemetry.families import SECONDS
from service.telemetry.quantiles import Durations, durations, quantiles


def cumulative(values: list[float]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return np.array([sum(value <= bound for value in values) for bound in (*SECONDS, math.inf)], np.float64)


def test_no_values_have_no_percentiles() -> None:
    assert durations(SECONDS, cumulative([]), 0.0) == Durations()


def test_percentiles_equal_those_of_prometheus() -> None:
    """The interpolation is linear within a bucket, as in histogram_quantile; 100 values fill one bucket evenly."""
    seen = durations(SECONDS, cumulative([0.004] * 100), 0.4)
    assert seen.count == 100
    assert seen.mean == pytest.approx(0.004)
    assert seen.p50 == pytest.approx(0.00375)
    assert seen.p90 == pytest.approx(0.00475)
    assert seen.p99 == pytest.approx(0.004975)


def test_the_first_bucket_begins_at_zero() -> None:
    assert durations(SECONDS, cumulative([1e-5, 1e-5]), 2e-5).p50 == pytest.approx(5e-5)


def test_values_beyond_the_last_bound_are_reported_as_that_bound() -> None:
    assert durations(SECONDS, cumulative([60.0] * 3), 180.0).p50 == SECONDS[-1]


@given(st.lists(st.floats(1e-4, 9.99), min_size=1, max_size=60), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_percentile_is_within_a_factor_of_two_and_a_half_of_the_true_one(values: list[float], q: float) -> None:
    true = sorted(values)[math.ceil(q * len(values)) - 1]
    told = float(quantiles(SECONDS, cumulative(values)[None], q)[0])
    assert true / 2.5 * (1 - 1e-9) <= told <= true * 2.5 * (1 + 1e-9)


def test_each_row_has_its_own_percentile() -> None:
    rows = np.stack([cumulative([0.004]), cumulative([]), cumulative([0.4])])
    told = quantiles(SECONDS, rows, 1.0)
    assert told[0] == 0.005
    assert math.isnan(told[1])
    assert told[2] == 0.5
