"""An hour of healthy traffic through a real server: one measured request a second, sent as fast as they are measured.

No counter and no decision of the server depends on the time between samples, so for the server an hour passes. For
Prometheus too: promtool, whose clock can be simulated where Prometheus' own cannot, gets the metrics that the server
had at the end of each of those minutes, and evaluates the rules on them.
"""

from __future__ import annotations

import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import faultymodels
import pytest
import yaml
from faultymodels import rows
from loopback import infer_request
from prometheus_client.parser import text_string_to_metric_families
from serverprocess import Serve, ServerProcess
from waiting import until
from workerprocesses import Client

pytestmark = pytest.mark.long
MINUTES, A_MINUTE = 60, 60  # requests of one row, each of which is measured
SERVING = """
shadow: {rate: 1, max_per_second: 100000}
fallback: {policy: fp32}
golden_seconds: 5
"""
RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "rules"
LABELS = {"model": "sound", "version": "1"}
SAMPLES = "bf16kit_drift_samples_total"
_seeds = count(50_000)
Told = dict[str, list[str]]  # series (name and labels) -> its value at each minute; "_": no value


@pytest.fixture
def server(tmp_path: Path, serve: Serve) -> ServerProcess:
    faultymodels.convert(tmp_path / "repository", "sound", tmp_path / "source")
    (tmp_path / "repository" / "sound" / "serving.yaml").write_text(SERVING, "utf-8")
    return serve("--repository", str(tmp_path / "repository")).wait_ready()


def samples(server: ServerProcess) -> Iterator[tuple[str, dict[str, str], float]]:
    for family in text_string_to_metric_families(server.get("/metrics")[1]):
        for sample in family.samples:
            yield sample.name, dict(sample.labels), sample.value


def value(server: ServerProcess, name: str, **labels: str) -> float:
    """Return the sum of the model's series of this name that have these labels; 0 if there is none."""
    wanted = {**LABELS, **labels}
    return sum(v for found, has, v in samples(server) if found == name and wanted.items() <= has.items())


def series(name: str, labels: dict[str, str]) -> str:
    listed = ", ".join(f'{key}="{text}"' for key, text in {**labels, "job": "bf16kit", "instance": "a:8002"}.items())
    return f"{name}{{{listed}}}"


def an_hour(server: ServerProcess) -> Told:
    """Send the requests, and return the content of ``/metrics`` at the end of every minute."""
    told: Told = defaultdict(lambda: ["_"] * (MINUTES + 1))
    client = Client(server.target)
    with client.channel:
        for minute in range(MINUTES + 1):
            for name, labels, found in samples(server):
                told[series(name, labels)][minute] = repr(found).replace("inf", "Inf").replace("nan", "NaN")
            told[series("up", {})][minute] = "1"
            for _ in range(A_MINUTE if minute < MINUTES else 0):
                client.call("ModelInfer", infer_request("sound", x=rows(1, next(_seeds))), timeout=60)
            asked = A_MINUTE * min(minute + 1, MINUTES)

            until(lambda asked=asked: value(server, SAMPLES, outcome="measured") == asked, 90)  # type: ignore[misc]
    return dict(told)


def fired(told: Told, scratch: Path) -> str:
    """Return promtool's output if any alert fires at any minute; empty if none does."""
    nothing = [
        {"expr": 'ALERTS{alertstate="firing"}', "eval_time": f"{minute}m", "exp_samples": []}
        for minute in range(MINUTES + 1)
    ]
    inputs = [{"series": name, "values": " ".join(values)} for name, values in told.items()]
    tests: dict[str, Any] = {
        "rule_files": sorted(map(str, RULES.glob("*.yml"))),
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": inputs, "promql_expr_test": nothing}],
    }
    file = scratch / "hour.yml"
    file.write_text(yaml.safe_dump(tests), "utf-8")
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr if done.returncode else ""


def test_an_hour_of_healthy_traffic_changes_no_drift_state_and_fires_no_alert(
    server: ServerProcess, tmp_path: Path
) -> None:
    told = an_hour(server)
    assert value(server, SAMPLES) == MINUTES * A_MINUTE, "all of them, none dropped or failed"
    for name in ("changes_total", "over_budget", "cause", "nonfinite_total", "out_of_range_total"):
        assert value(server, f"bf16kit_drift_{name}") == 0, name
    assert value(server, "bf16kit_drift_change_score") < 2, "of two outputs, each below its threshold"
    assert value(server, "bf16kit_fallback_transitions_total") == 0
    assert value(server, "bf16kit_answers_total", precision="fp32") == 0
    assert value(server, "bf16kit_golden_gate_passed") == 1
    assert [line for line in server.lines if "WARNING" in line or "ERROR" in line] == []
    if shutil.which("promtool") is None:
        pytest.skip("no promtool on PATH (Debian: apt-get install prometheus)")
    assert fired(told, tmp_path) == ""
    over = {**told, series("bf16kit_drift_over_budget", LABELS): ["1"] * (MINUTES + 1)}
    assert "Bf16DriftOverBudget" in fired(over, tmp_path), "it would have been seen"
