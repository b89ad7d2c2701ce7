"""Fleets in simulations with fixed seeds; `python -m bench drift_fleet` has more runs and weeks."""

from __future__ import annotations

import numpy as np
import pytest

from bench.drift.fleet import FAULTS, SOUND, Kind, false_alarms, grouped, minutes_until_seen


@pytest.mark.parametrize("fault", FAULTS[:3], ids=lambda fault: fault.name)
def test_all_replicas_together_see_a_fault_sooner_than_one_by_itself(fault: Kind) -> None:
    pooled, alone = minutes_until_seen(fault, np.random.default_rng(1))
    assert 2 * pooled <= alone < np.inf


@pytest.mark.parametrize("kind", SOUND, ids=lambda kind: kind.name)
def test_a_mean_at_the_budget_is_no_alarm_and_one_above_it_is(kind: Kind) -> None:
    assert false_alarms(kind, 1, np.random.default_rng(2)) == 0
    above = Kind(kind.name, kind.shares, tuple(3 * median for median in kind.medians), kind.spread)
    assert minutes_until_seen(above, np.random.default_rng(2))[0] < 30


def test_alerts_at_different_times_are_not_merged() -> None:
    rng = np.random.default_rng(3)
    assert grouped(1e-6, rng)[0] > 50
    single, merged = grouped(1e-6, rng)
    assert merged == single
    assert grouped(1e9, rng)[1] == 1
