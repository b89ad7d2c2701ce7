"""The rules on many replicas: problems in turn, a few of many, faults of all, and drift that none sees by itself."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from manyreplicas import BUDGET, MODEL, POOLED, drifting, firing, labelled, needs_promtool, promtool, target

from bf16kit.drift.metrics import SampleDrift
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.service.telemetry.metrics import Metrics, samples
from bf16kit.service.telemetry.modelmetrics import ModelMetrics

SOUND = 0.3  # of the budget
Values = Sequence[float | str]


# --- what few of many replicas have, and what all have ----------------------------------------------------------------


@needs_promtool
@pytest.mark.parametrize("replicas", [10, 30])
def test_replicas_that_are_down_and_load_in_turn_alert_nobody(replicas: int, tmp_path: Path) -> None:
    """A rolling restart: at any time one is not ready, or its reference loads, each for a minute."""
    series: dict[str, Values] = {}
    for number in range(replicas):
        in_turn = [float(minute != 5 + number) for minute in range(replicas + 20)]
        for name in (target("up", number), labelled("bf16kit_model_ready", number)):
            series[name] = in_turn
        series[labelled("bf16kit_drift_reference_up", number)] = in_turn
    assert promtool(tmp_path, series, firing(replicas + 15, window="2h")) == ""


@needs_promtool
@pytest.mark.parametrize(("affected", "severity"), [(1, "warning"), (2, "critical")])
def test_a_server_that_is_down_restarts_or_serves_no_model_pages_if_a_tenth_are(
    affected: int, severity: str, tmp_path: Path
) -> None:
    series: dict[str, Values] = {}
    for number in range(20):
        ill = number < affected
        series[target("up", number)] = [float(not (ill and 5 <= minute < 15)) for minute in range(40)]
        series[target("process_start_time_seconds", number)] = [
            min(minute, 18) if ill and minute >= 15 else 0.0 for minute in range(40)
        ]
        series[labelled("bf16kit_model_ready", number)] = [float(not (ill and minute >= 30)) for minute in range(40)]
    tests = (
        firing(5),
        firing(8, ("Bf16ServerDown", severity)),
        firing(20, ("Bf16ServerRestarting", severity)),
        firing(34),
        firing(37, ("Bf16ModelNotReady", severity)),
    )
    assert promtool(tmp_path, series, *tests) == ""


def broken(number: int, fallback: int) -> dict[str, Values]:
    return {
        labelled("bf16kit_drift_over_budget", number): [1] * 31,
        labelled("bf16kit_drift_cause", number, cause="broken"): [1] * 31,
        labelled("bf16kit_drift_change_score", number, output="y"): [2] * 31,
        labelled("bf16kit_fallback_active", number): [fallback] * 31,
    }


def failing(number: int) -> dict[str, Values]:
    return {
        labelled("bf16kit_requests_total", number, code="OK"): [0] * 31,
        labelled("bf16kit_requests_total", number, code="INTERNAL"): [60 * minute for minute in range(31)],
    }


def crashing(number: int) -> dict[str, Values]:
    return {
        target("process_start_time_seconds", number): [60 * minute for minute in range(31)],
        labelled("bf16kit_model_ready", number): [0] * 31,
    }


CHANGED = (("Bf16DriftChanged", "warning"), ("Bf16ModelBroken", "critical"))


@needs_promtool
@pytest.mark.parametrize(
    ("fault", "alerts"),
    [
        (lambda number: broken(number, 0), (*CHANGED, ("Bf16DriftOverBudget", "critical"))),
        (lambda number: broken(number, 1), (*CHANGED, ("Bf16FallbackActive", "warning"))),
        (failing, (("Bf16FailureBudgetBurning", "critical"),)),
        (crashing, (("Bf16ModelNotReady", "critical"), ("Bf16ServerRestarting", "critical"))),
    ],
    ids=["a broken kernel", "the same, and fp32 answers", "every request fails", "it crashes every minute"],
)
def test_what_is_wrong_on_all_replicas_is_one_alert_of_each_kind(
    fault: Callable[[int], dict[str, Values]], alerts: tuple[tuple[str, str], ...], tmp_path: Path
) -> None:
    series: dict[str, Values] = {}
    for number in range(100):
        series |= {target("up", number): [1] * 31, **fault(number)}
    assert promtool(tmp_path, series, firing(30, *alerts, window="30m")) == ""


@needs_promtool
@pytest.mark.parametrize(("affected", "severity"), [(1, "warning"), (3, "critical"), (20, "critical")])
def test_a_few_of_many_replicas_over_the_budget_are_no_reason_to_page(
    affected: int, severity: str, tmp_path: Path
) -> None:
    """One of twenty is below a tenth. The alert says how many there are, and names three."""
    series: dict[str, Values] = {
        labelled("bf16kit_drift_over_budget", number): [float(number < affected)] * 10 for number in range(20)
    }
    series[labelled("bf16kit_drift_budget_ratio", 0, output="y", metric="relative_l2")] = [1.5] * 10
    names = ", ".join(f"r{number:03}:8002" for number in range(min(affected, 3))) + (" …" if affected > 3 else "")
    description = (
        "The outputs of m version 1 are farther from the fp32 reference than the budget allows, beyond chance. Affected"
        f" instances: {affected} ({names}). Largest: relative_l2 of output y, 150% of its budget."
        " bf16 still serves: `fallback` is not fp32, or fp32 does not serve yet."
    )
    alert = {
        "exp_labels": {**MODEL, "severity": severity},
        "exp_annotations": {
            "summary": "m version 1 exceeds its drift budget",
            "description": description,
            "runbook": "docs/runbook.md#bf16driftoverbudget",
        },
    }
    expected = {"eval_time": "5m", "alertname": "Bf16DriftOverBudget", "exp_alerts": [alert]}
    assert promtool(tmp_path, series, expected, kind="alert_rule_test") == ""


# --- drift of all replicas together -----------------------------------------------------------------------------------


def replica(
    minutes: int, ratio: float, *, then: float | None = None, over: bool = False, fp32: bool = False
) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
    """Return a replica's drift of ``minutes``, followed by as many of another, and the states of its own verdict."""
    ratios = [ratio] * minutes + ([] if then is None else [then] * 200)
    return ratios, [float(over)] * len(ratios), [float(fp32)] * len(ratios)


ALL = ("Bf16FleetDriftOverBudget", "critical")
OVER = ("Bf16DriftOverBudget", "warning")
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
        (firing(59, OVER, window="1h"),),
    ),
    "the same, and the others are at twice the budget": (
        [replica(60, 100.0, over=True), *[replica(60, 2.0)] * 19],
        (firing(59, OVER, ALL, window="1h"),),
    ),
}


@needs_promtool
@pytest.mark.long
@pytest.mark.parametrize("fleet", FLEETS)
def test_the_fleets_alert_is_about_drift_that_is_there_and_that_no_replica_sees(fleet: str, tmp_path: Path) -> None:
    replicas, tests = FLEETS[fleet]
    series = dict(each for number, parts in enumerate(replicas) for each in drifting(number, *parts))
    assert promtool(tmp_path, series, *tests) == ""


class Fleet:
    """Replicas that count one request at a time, of one to four rows each, with a weight and a drift that are drawn."""

    def __init__(self, replicas: int, mean: float) -> None:
        self.metrics = [Metrics() for _ in range(replicas)]
        self._models = [self._model(metrics) for metrics in self.metrics]
        self._random = np.random.default_rng(9)
        self._mean = mean
        self._weight = self._drift = 0.0  # of all rows

    @staticmethod
    def _model(metrics: Metrics) -> ModelMetrics:
        model = metrics.add("m", 1)
        model.opened(1, [TensorSpec("y", "float32", ("batch", 4), "other")])
        return model

    @property
    def mean(self) -> float:
        """Return the mean drift of all rows."""
        return self._drift / self._weight

    def measure(self) -> None:
        """Have each replica measure a request: rare ones drift twice as much, and are measured forty times as often."""
        for model in self._models:
            rare = self._random.random() < 0.5
            weight, centre = (1.0, 2 * self._mean) if rare else (40.0, self._mean)
            rows = centre * np.exp(0.3 * self._random.standard_normal(int(self._random.integers(1, 5))))
            model.judged_rows("y", [SampleDrift(each, each**2, each, 40.0, 0, 0, 0) for each in rows.tolist()], weight)
            self._weight += weight * len(rows)
            self._drift += weight * float(rows.sum())

    def sums(self) -> Iterator[tuple[int, Mapping[str, str], float]]:
        """Yield each replica's sums: its number, the labels of metric and moment, the value."""
        for number, metrics in enumerate(self.metrics):
            for sample in samples(metrics.values()):
                if sample.name == POOLED:
                    yield number, {label: sample.labels[label] for label in ("metric", "moment")}, sample.value


@needs_promtool
@pytest.mark.long
@pytest.mark.parametrize("mean", [1.2 * BUDGET, 0.9 * BUDGET])
def test_the_pooled_mean_is_that_of_all_rows_and_is_judged_by_its_error(mean: float, tmp_path: Path) -> None:
    """Fifty replicas of one request a minute: after eight minutes the fleet's verdict is there."""
    fleet, minutes = Fleet(50, mean), 8
    series: dict[str, list[float]] = defaultdict(list)
    for minute in range(minutes + 1):
        if minute:
            fleet.measure()
        for number, labels, value in fleet.sums():
            series[labelled(POOLED, number, output="y", **labels)].append(value)
        for number in range(50):
            series[labelled("bf16kit_drift_budget", number, metric="relative_l2")].append(BUDGET)
            series[labelled("bf16kit_drift_over_budget", number)].append(0)
            series[labelled("bf16kit_fallback_active", number)].append(0)
    one = [{"labels": "{}", "value": 1}]
    pooled = 'sum(bf16kit:drift_mean:pooled{metric="relative_l2", window="1h"})'
    agrees = f"abs({pooled} / {fleet.mean!r} - 1) < bool 0.001"
    fires = 'count(ALERTS{alertname="Bf16FleetDriftOverBudget", alertstate="firing"})'
    tests = [
        {"expr": expression, "eval_time": f"{minutes}m", "exp_samples": expected}
        for expression, expected in ((agrees, one), (fires, one if mean > BUDGET else []))
    ]
    assert promtool(tmp_path, series, *tests) == ""
