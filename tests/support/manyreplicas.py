"""Series of many replicas for the rules as shipped, evaluated by promtool."""

import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import yaml
from prometheusprocess import RULES

from bf16kit.service.telemetry.families import MOMENTS
from bf16kit.service.telemetry.modelmetrics import moments

PROMTOOL = shutil.which("promtool") or ""
needs_promtool = pytest.mark.skipif(not PROMTOOL, reason="no promtool on PATH (Debian: apt-get install prometheus)")
BUDGET = 0.015
POOLED = "bf16kit_drift_pooled_total"
MODEL = {"job": "bf16kit", "model": "m", "version": "1"}
Series = Mapping[str, Sequence[float | str]]
_SPREAD = (0.9, 1.0, 1.1)  # of the drift of a minute's requests


def promtool(where: Path, series: Series, *tests: object, kind: str = "promql_expr_test") -> str:
    """Evaluate the rules on ``series`` with a value a minute. Return promtool's message; empty if ``tests`` pass."""
    inputs = [{"series": name, "values": " ".join(map(str, values))} for name, values in series.items()]
    content = {
        "rule_files": sorted(map(str, RULES.glob("*.yml"))),
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": inputs, kind: list(tests)}],
    }
    (where / "rules.yml").write_text(yaml.safe_dump(content), "utf-8")
    done = subprocess.run([PROMTOOL, "test", "rules", str(where / "rules.yml")], capture_output=True, text=True)
    return done.stdout + done.stderr if done.returncode else ""


def firing(minute: int, *alerts: tuple[str, str], window: str = "1m") -> dict[str, object]:
    """Return promtool's test that these alerts, by name and severity, and no others fired up to ``minute``."""
    return {
        "expr": f'count by (alertname, severity) (last_over_time(ALERTS{{alertstate="firing"}}[{window}]))',
        "eval_time": f"{minute}m",
        "exp_samples": [
            {"labels": f'{{alertname="{name}", severity="{severity}"}}', "value": 1} for name, severity in alerts
        ],
    }


def labelled(name: str, instance: int, **labels: str) -> str:
    listed = {"instance": f"r{instance:03}:8002", **MODEL, **labels}
    return name + "{" + ", ".join(f'{label}="{value}"' for label, value in listed.items()) + "}"


def target(name: str, instance: int) -> str:
    """Return a series of a server, without a model."""
    return f'{name}{{instance="r{instance:03}:8002", job="bf16kit"}}'


def drifting(
    number: int, ratios: Sequence[float], over: Sequence[float], in_fp32: Sequence[float]
) -> Iterator[tuple[str, list[float | str]]]:
    """Yield the series of a replica: its drift ÷ budget in each minute, and whether it sees it and falls back."""
    total = [0.0] * 5
    sums: list[list[float]] = []
    for ratio in ratios:
        total = [a + b for a, b in zip(total, moments([BUDGET * ratio], 1.0), strict=True)]
        for spread in _SPREAD:
            total = [a + b for a, b in zip(total, moments([BUDGET * ratio * spread], 5.0), strict=True)]
        sums.append(total)
    for moment, values in zip(MOMENTS, zip(*sums, strict=True), strict=True):
        yield labelled(POOLED, number, output="y", metric="relative_l2", moment=moment), [*values, "stale"]
    yield labelled("bf16kit_drift_budget", number, metric="relative_l2"), [*(BUDGET for _ in ratios), "stale"]
    yield labelled("bf16kit_drift_over_budget", number), [*over, "stale"]
    yield labelled("bf16kit_fallback_active", number), [*in_fp32, "stale"]
    yield target("up", number), [*(1.0 for _ in ratios), "stale"]
