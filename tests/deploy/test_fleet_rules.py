"""The rules that regard all replicas together: what they say of a fleet, and that a fault of all is one alert."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import prometheusprocess
import pytest
from fleetrules import WRONG, firing, is_over
from manyreplicas import BUDGET, MODEL, POOLED, PROMTOOL, labelled, needs_promtool, promtool
from prometheusprocess import Prometheus
from waiting import until

from bf16kit.drift.metrics import SampleDrift
from bf16kit.numerics.tensors import TensorSpec
from service.telemetry.families import MOMENTS
from service.telemetry.metrics import Metrics, samples
from service.telemetry.modelmetrics import ModelMetrics


class Fleet:
    """Replicas that count one request at a time, of one to four rows each, with a weight and a drift that are drawn."""

    def __init__(self, replicas: int, mean: float) -> None:
        self.metrics = [Metrics() for _ in range(replicas)]
        self._models = [self._model(metrics) for metrics in self.metrics]
        self._random = np.random.default_rng(9)
        self._mean = mean
        self.weight = self.drift = 0.0  # of all rows

    @staticmethod
    def _model(metrics: Metrics) -> ModelMetrics:
        model = metrics.add("m", 1)
        model.opened(1, [TensorSpec("y", "float32", ("batch", 4), "other")])
        return model

    def measure(self) -> None:
        """Have each replica measure a request: rare ones drift twice as much, and are measured forty times as often."""
        for model in self._models:
            rare = self._random.random() < 0.5
            weight, centre = (1.0, 2 * self._mean) if rare else (40.0, self._mean)
            rows = centre * np.exp(0.3 * self._random.standard_normal(int(self._random.integers(1, 5))))
            model.judged_rows("y", [SampleDrift(each, each**2, each, 40.0, 0, 0, 0) for each in rows.tolist()], weight)
            self.weight += weight * len(rows)
            self.drift += weight * float(rows.sum())

    def sums(self) -> Iterator[tuple[int, str, str, float]]:
        """Yield each replica's sums: its number, the metric, the moment, the value."""
        for number, metrics in enumerate(self.metrics):
            for sample in samples(metrics.values()):
                if sample.name == POOLED:
                    yield number, sample.labels["metric"], sample.labels["moment"], sample.value


@pytest.mark.long
@needs_promtool
@pytest.mark.parametrize("mean", [1.2 * BUDGET, 0.9 * BUDGET])
def test_the_pooled_mean_is_that_of_all_rows_and_is_judged_by_its_error(mean: float, tmp_path: Path) -> None:
    """Fifty replicas of one request a minute: after eight minutes the fleet's verdict is there."""
    fleet, minutes = Fleet(50, mean), 8
    series: dict[str, list[float]] = defaultdict(list)
    for minute in range(minutes + 1):
        if minute:
            fleet.measure()
        for number, metric, moment, value in fleet.sums():
            series[labelled(POOLED, number, output="y", metric=metric, moment=moment)].append(value)
        for number in range(50):
            series[labelled("bf16kit_drift_budget", number, metric="relative_l2")].append(BUDGET)
            series[labelled("bf16kit_drift_over_budget", number)].append(0)
            series[labelled("bf16kit_fallback_active", number)].append(0)
    total = np.zeros(5)
    for _, metric, moment, value in fleet.sums():
        total[MOMENTS.index(moment)] += value if metric == "relative_l2" else 0
    over = bool(is_over(total, BUDGET))
    assert over == (mean > BUDGET)
    truth = fleet.drift / fleet.weight
    selected = '{metric="relative_l2", window="1h"}'
    fires = 'count(ALERTS{alertname="Bf16FleetDriftOverBudget", alertstate="firing"})'
    tests = {
        "promql_expr_test": [
            {
                "expr": f"abs(sum(bf16kit:drift_mean:pooled{selected}) / {truth!r} - 1) < bool 0.001",
                "eval_time": f"{minutes}m",
                "exp_samples": [{"labels": "{}", "value": 1}],
            },
            {
                "expr": fires,
                "eval_time": f"{minutes}m",
                "exp_samples": [{"labels": "{}", "value": 1}] if over else [],
            },
        ]
    }
    assert promtool(tmp_path, series, tests) == ""


@needs_promtool
@pytest.mark.parametrize(("affected", "severity"), [(1, "warning"), (3, "critical"), (20, "critical")])
def test_a_few_of_many_replicas_over_the_budget_are_no_reason_to_page(
    affected: int, severity: str, tmp_path: Path
) -> None:
    """One of twenty is below a tenth. The alert says how many there are, and names three."""
    series: dict[str, list[float]] = {
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
            "runbook": "docs/drift.md#bf16driftoverbudget",
        },
    }
    tests = {"alert_rule_test": [{"eval_time": "5m", "alertname": "Bf16DriftOverBudget", "exp_alerts": [alert]}]}
    assert promtool(tmp_path, series, tests) == ""


_OVER = {"Bf16DriftChanged", "Bf16ModelBroken"}
ALERTS_OF = {
    "a release with a broken kernel": {*_OVER, "Bf16DriftOverBudget"},
    "the same, and fp32 answers": {*_OVER, "Bf16FallbackActive"},
    "a release that fails every request": {"Bf16FailureBudgetBurning"},
    "a release that crashes every minute": {"Bf16ModelNotReady", "Bf16ServerRestarting"},
}


@needs_promtool
@pytest.mark.parametrize("fault", WRONG)
def test_what_is_wrong_on_all_replicas_is_one_alert_of_each_kind(fault: str) -> None:
    found = firing(PROMTOOL, fault, 100)
    assert {name for name, _ in found} == ALERTS_OF[fault]
    assert set(found.values()) == {1}


@contextmanager
def exporter(metrics: Metrics) -> Iterator[int]:
    """Serve the metrics as a server does, and yield the port."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body, content_type = metrics.expose(self.headers.get("Accept", ""))
            self.send_response(200)
            self.send_header("Content-Type", content_type)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.mark.long  # some seconds of scrapes
@pytest.mark.skipif(
    prometheusprocess.find() is None, reason="no prometheus on PATH (Debian: apt-get install prometheus)"
)
def test_a_real_prometheus_pools_the_drift_of_several_servers(tmp_path: Path) -> None:
    fleet = Fleet(6, 0.02)
    with ExitStack() as stack:
        first, *others = [stack.enter_context(exporter(metrics)) for metrics in fleet.metrics]
        prometheus = stack.enter_context(Prometheus(first, tmp_path / "own", others=others))
        until(
            lambda: len(prometheus.query(f'{POOLED}{{metric="relative_l2", moment="weight"}}')) == 6, 30, "six servers"
        )

        def pooled() -> float | None:
            fleet.measure()
            found = prometheus.query('bf16kit:drift_mean:pooled{metric="relative_l2", window="1h"}')
            return float(found[0][""]) if found and found[0][""] != "NaN" else None

        def agrees() -> bool:
            found = pooled()
            return fleet.weight > 5e4 and found is not None and abs(found / (fleet.drift / fleet.weight) - 1) < 0.01

        until(agrees, 60, "the mean of all rows")
