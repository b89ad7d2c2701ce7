from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from bench.drift import overbudget
from bench.drift.overbudget import BREACHES, WITHIN, Draw
from bf16kit.drift.metrics import Budget, SampleDrift
from service.drift.estimates import estimates
from service.drift.recent import RecentRows


@pytest.mark.parametrize("traffic", [overbudget.mixed(0.05, 0.15), overbudget.lognormal(0.5, 2.0)])
@pytest.mark.parametrize("bound", [{"relative_l2": 7e-3}, {"cosine_distance": 3e-5}, {"relative_l2.p99": 0.015}])
def test_the_arrays_have_the_statistics_of_the_server(
    traffic: Draw, bound: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overbudget, "BOUNDS", Budget.from_dict(bound))
    rows = overbudget.draw(traffic, np.random.default_rng(1), 3000)
    recent, state = RecentRows(), False
    found = overbudget.over(rows)
    assert 0 < found.sum() < len(found)
    for at, (drift, cosine, weight) in enumerate(zip(rows.relative_l2, rows.cosine, rows.weights, strict=True)):
        recent.add([SampleDrift(drift, cosine, drift, math.inf, 0, 0, 0)], weight)
        (each,) = estimates(recent.window(), overbudget.BOUNDS)
        state = each.lowest > 1 or (state and each.low > 1)
        assert state == found[at], (at, each)


@pytest.mark.parametrize("traffic", WITHIN.values(), ids=WITHIN.keys())
def test_two_days_of_traffic_within_the_budget_are_never_over(traffic: Draw) -> None:
    assert overbudget.episodes(traffic, 2 / 7, np.random.default_rng(3)) == 0


@pytest.mark.long
def test_by_the_narrow_interval_chance_would_often_report_a_breach(monkeypatch: pytest.MonkeyPatch) -> None:
    """The traffic is that of the test above, which shows that it can fail."""
    both: Callable[[overbudget.Floats, overbudget.Floats], tuple[overbudget.Floats, overbudget.Floats]]
    both = overbudget.lower_ends
    monkeypatch.setattr(overbudget, "lower_ends", lambda *values: (both(*values)[1],) * 2)
    assert overbudget.episodes(WITHIN["1 row in 10,000 destroyed"], 4, np.random.default_rng(3)) >= 4


@pytest.mark.parametrize(
    ("traffic", "goal"),
    [case for case in BREACHES.values() if case[1]],
    ids=[name for name, case in BREACHES.items() if case[1]],
)
def test_a_breach_is_established_soon(traffic: Draw, goal: float) -> None:
    delays = [overbudget.delay(traffic, np.random.default_rng(run), 400) for run in range(9)]
    assert np.median(delays) <= goal
