from __future__ import annotations

import math

import numpy as np
import pytest

from bench.drift.detector import cases, poisson, resampled
from bench.drift.streams import Case, delays, false_alarms, start_streams, traffic
from service.drift.detector import WEEK, Detector, Expected, threshold

CASES = {case.name: case for case in [*cases(), resampled(list(4e-3 * np.exp(np.linspace(-0.2, 0.2, 200))))]}


def test_each_of_several_streams_equals_the_servers_detector() -> None:
    case = CASES["normal, spread 0.3"]
    streams = start_streams(case, 3, np.random.default_rng(0))
    alone = [Detector(Expected(centre, 0.0, root)) for centre, root in zip(streams.centre, streams._root, strict=True)]
    rng = np.random.default_rng(1)
    seen = 0
    for log_drift in traffic(case, 400, streams, rng, factor=2.0):
        over = streams.add(log_drift)
        for at, detector in enumerate(alone):
            detector.add([math.exp(log_drift[at])])
            assert detector.score == pytest.approx(streams.sum[at] / threshold(1), abs=1e-9)
        seen += int(over.sum())
    assert seen > 0


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_two_days_of_healthy_samples_give_no_alarm_and_changes_are_detected_soon(case: Case) -> None:
    rng = np.random.default_rng(2)
    assert false_alarms(case, 2 * 86_400, 64, rng) == 0
    assert np.quantile(delays(case, 2.0, 200, rng), 0.99, method="higher") <= 200
    assert np.quantile(delays(case, 8.0, 200, rng), 0.99, method="higher") <= 50


@pytest.mark.long
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_ten_weeks_of_healthy_samples_give_fewer_than_ten_alarms(case: Case) -> None:
    assert poisson(false_alarms(case, 10 * WEEK, 64, np.random.default_rng(3)))[1] < 10


def test_the_interval_of_a_count_equals_that_of_statistical_tables() -> None:
    assert poisson(0) == pytest.approx((0.0, 3.689), abs=1e-3)
    assert poisson(10) == pytest.approx((4.795, 18.39), abs=0.01)
