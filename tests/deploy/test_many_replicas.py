"""Alerts on many replicas: those that have a problem in turn, a few of many, and drift that none sees by itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from manyreplicas import drifting, firing, labelled, needs_promtool, promtool, target

pytestmark = needs_promtool
SOUND = 0.3  # of the budget


@pytest.mark.parametrize("replicas", [10, 30])
def test_replicas_that_are_down_and_load_in_turn_alert_nobody(replicas: int, tmp_path: Path) -> None:
    """A rolling restart: at any time one is not ready, or its reference loads, each for a minute."""
    series: dict[str, list[float]] = {}
    for number in range(replicas):
        in_turn = [float(minute != 5 + number) for minute in range(replicas + 20)]
        series[target("up", number)] = in_turn
        series[labelled("bf16kit_model_ready", number)] = in_turn
        series[labelled("bf16kit_drift_reference_up", number)] = in_turn
    quiet = {"promql_expr_test": [firing(replicas + 15, window="2h")]}
    assert promtool(tmp_path, series, quiet) == ""


@pytest.mark.parametrize(("affected", "severity"), [(1, "warning"), (2, "critical")])
def test_a_server_that_is_down_restarts_or_serves_no_model_pages_if_a_tenth_are(
    affected: int, severity: str, tmp_path: Path
) -> None:
    series: dict[str, list[float]] = {}
    for number in range(20):
        ill = number < affected
        series[target("up", number)] = [float(not (ill and 5 <= minute < 15)) for minute in range(40)]
        series[target("process_start_time_seconds", number)] = [
            min(minute, 18) if ill and minute >= 15 else 0.0 for minute in range(40)
        ]
        series[labelled("bf16kit_model_ready", number)] = [float(not (ill and minute >= 30)) for minute in range(40)]
    tests = [
        firing(5),
        firing(8, ("Bf16ServerDown", severity)),
        firing(20, ("Bf16ServerRestarting", severity)),
        firing(34),
        firing(37, ("Bf16ModelNotReady", severity)),
    ]
    assert promtool(tmp_path, series, {"promql_expr_test": tests}) == ""


def replica(
    minutes: int, ratio: float, *, then: float | None = None, over: bool = False, fp32: bool = False
) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
    """Return a replica's drift of ``minutes``, followed by as many of another, and the states of its own verdict."""
    ratios = [ratio] * minutes + ([] if then is None else [then] * 200)
    return ratios, [float(over)] * len(ratios), [float(fp32)] * len(ratios)


ALL = ("Bf16FleetDriftOverBudget", "critical")
FLEETS = {
    "ten times the budget, and repaired after half an hour": (
        [replica(30, 10.0, then=SOUND)] * 3,
        (firing(30, ALL), firing(90), firing(220)),
    ),
    "a replica at a hundred times the budget that is deleted after half an hour": (
        [replica(30, 100.0), *[replica(200, SOUND)] * 2],
        (firing(30, ALL), firing(55), firing(190)),
    ),
    "the same, and fp32 answers for it": (
        [replica(60, 100.0, over=True, fp32=True), *[replica(60, SOUND)] * 2],
        (firing(59, ("Bf16FallbackActive", "warning"), window="1h"),),
    ),
    "one of twenty at a hundred times the budget, which it sees by itself": (
        [replica(60, 100.0, over=True), *[replica(60, SOUND)] * 19],
        (firing(59, ("Bf16DriftOverBudget", "warning"), window="1h"),),
    ),
    "the same, and the others are at twice the budget": (
        [replica(60, 100.0, over=True), *[replica(60, 2.0)] * 19],
        (firing(59, ("Bf16DriftOverBudget", "warning"), ALL, window="1h"),),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("fleet", FLEETS)
def test_the_fleets_alert_is_about_drift_that_is_there_and_that_no_replica_sees(fleet: str, tmp_path: Path) -> None:
    replicas, tests = FLEETS[fleet]
    series = dict(each for number, parts in enumerate(replicas) for each in drifting(number, *parts))
    assert promtool(tmp_path, series, {"promql_expr_test": list(tests)}) == ""
