"""Reads the drift that a running server measures, from its ``/metrics`` as Prometheus would."""

from __future__ import annotations

import urllib.request
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from running import PATIENCE_SECONDS

METRICS = ("relative_l2", "cosine_distance")


@dataclass(frozen=True)
class Row:
    """One metric of one output: its mean over all measured samples, the manifest's value, and recent drift ÷ budget."""

    output: str
    metric: str
    mean: float
    baseline: float
    ratio: float


@dataclass(frozen=True)
class LiveDrift:
    """Live drift; ``outcomes`` counts shadowed requests by outcome: measured, dropped, failed.

    ``up``: the fp32 reference is loaded and answers.
    """

    outcomes: dict[str, float]
    rows: list[Row]
    up: bool

    @property
    def measured(self) -> int:
        return int(self.outcomes.get("measured", 0))

    @property
    def progress(self) -> str:
        """How far the measuring is. It changes as long as there is any."""
        failed = self.outcomes.get("failed", 0)
        state = "is up" if self.up else "is loading or could not be loaded"
        return f"{self.measured} requests are measured and {failed:.0f} failed, and the fp32 reference {state}"


def read(address: str) -> LiveDrift:
    """Return the drift series of the only model that the server at ``address`` (host:port) serves."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=PATIENCE_SECONDS) as reply:
        families = text_string_to_metric_families(reply.read().decode())
        samples = [sample for family in families for sample in family.samples]
    outcomes = {s.labels["outcome"]: s.value for s in _named(samples, "bf16kit_drift_samples_total")}
    outputs = sorted({s.labels["output"] for s in _named(samples, "bf16kit_drift_relative_l2_count")})
    rows = [_row(samples, output, metric) for output in outputs for metric in METRICS]
    return LiveDrift(outcomes, rows, _value(samples, "bf16kit_drift_reference_up") == 1)


def _row(samples: list[Sample], output: str, metric: str) -> Row:
    total, count = (_value(samples, f"bf16kit_drift_{metric}_{part}", output=output) for part in ("sum", "count"))
    return Row(
        output,
        metric,
        mean=total / count if count else 0.0,
        baseline=_value(samples, "bf16kit_drift_baseline", output=output, metric=metric),
        ratio=_value(samples, "bf16kit_drift_budget_ratio", output=output, metric=metric),
    )


def _named(samples: list[Sample], name: str) -> list[Sample]:
    return [sample for sample in samples if sample.name == name]


def _value(samples: list[Sample], name: str, **labels: str) -> float:
    """Return the value of the one series with these labels; 0 if there is none."""
    found = (s.value for s in _named(samples, name) if labels.items() <= s.labels.items())
    return next(found, 0.0)
