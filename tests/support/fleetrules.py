"""What the rules say of many replicas: the alerts that fire, by promtool, and the pooled verdict as arrays."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from service.drift.intervals import Z_ALWAYS

_RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "rules"
_MINUTES = 30
_EFFECTIVE = 100  # requests, of the rule
_FIRING = re.compile(r'\{alertname="(\w+)", severity="(\w+)"\} ([\d.E+]+)')
_TARGET = 'job="bf16kit", instance="r{number}:8002"'
_MODEL = '{target}, model="m", version="2"'
_BROKEN = (
    f"bf16kit_drift_over_budget{{{_MODEL}}} 1x30",
    f'bf16kit_drift_cause{{{_MODEL}, cause="broken"}} 1x30',
    f'bf16kit_drift_change_score{{{_MODEL}, output="y"}} 2x30',
)

#: The series of a replica, by what is wrong, each with its values in promtool's notation.
WRONG: Mapping[str, tuple[str, ...]] = {
    "a release with a broken kernel": (*_BROKEN, f"bf16kit_fallback_active{{{_MODEL}}} 0x30"),
    "the same, and fp32 answers": (*_BROKEN, f"bf16kit_fallback_active{{{_MODEL}}} 1x30"),
    "a release that fails every request": (
        f'bf16kit_requests_total{{{_MODEL}, code="OK"}} 0x30',
        f'bf16kit_requests_total{{{_MODEL}, code="INTERNAL"}} 0+60x30',
    ),
    "a release that crashes every minute": (
        "process_start_time_seconds{{target}} 0+60x30",
        f"bf16kit_model_ready{{{_MODEL}}} 0x30",
    ),
}


def firing(promtool: str, fault: str, replicas: int) -> dict[tuple[str, str], int]:
    """Return how many alerts of each name and severity fire in the half hour after a release with ``fault``.

    promtool has no command that prints them, so they are read from its message that none was expected.
    """
    series = ""
    for number in range(replicas):
        for each in ("up{{target}} 1x30", *WRONG[fault]):
            selector, _, values = each.replace("{target}", _TARGET.format(number=number)).rpartition(" ")
            series += f"      - {{series: '{selector}', values: '{values}'}}\n"
    listed = "".join(f"  - {path}\n" for path in sorted(_RULES.glob("*.yml")))
    expression = 'count by (alertname, severity) (last_over_time(ALERTS{alertstate="firing"}[30m]))'
    text = (
        f"rule_files:\n{listed}evaluation_interval: 1m\ntests:\n  - interval: 1m\n    input_series:\n{series}"
        f"    promql_expr_test:\n      - {{expr: '{expression}', eval_time: {_MINUTES}m, exp_samples: []}}\n"
    )
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "fleet.yml").write_text(text, "utf-8")
        done = subprocess.run(
            [promtool, "test", "rules", str(Path(scratch) / "fleet.yml")], capture_output=True, text=True, check=False
        )
    said = (done.stdout + done.stderr).replace('\\"', '"')
    if "got:" not in said:
        raise RuntimeError(f"promtool: {said}")
    return {(name, severity): int(float(count)) for name, severity, count in _FIRING.findall(said)}


def is_over(sums: NDArray[np.float64], budget: float) -> NDArray[np.bool_]:
    """Whether the pooled mean is over ``budget`` beyond chance, by the moments in the last axis of ``sums``."""
    weight, drift, weight2, product, drift2 = np.moveaxis(sums, -1, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = drift / weight
        error = np.sqrt(np.maximum(drift2 - 2 * mean * product + mean**2 * weight2, 0)) / weight
        low = mean * np.exp(-Z_ALWAYS * error / mean)
        return np.asarray((low > budget) & (weight**2 / weight2 > _EFFECTIVE))
