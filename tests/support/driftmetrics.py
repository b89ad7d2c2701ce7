"""A model's metrics of live drift, as a test reads them."""

from __future__ import annotations

from bf16kit.numerics.tensors import TensorSpec
from service.telemetry.modelmetrics import ModelMetrics


class DriftMetrics(ModelMetrics):
    """The metrics of a version with these outputs. Names are without ``bf16kit_drift_``."""

    def __init__(self, *outputs: TensorSpec) -> None:
        super().__init__("m", 1)
        self.opened(0, outputs)

    def value(self, name: str, *labels: str) -> float | None:
        """Return a counter's or a gauge's value; None if there is no such series."""
        return self.copy()[0][f"drift_{name}"].get(labels)

    def ratio(self, metric: str, output: str = "y") -> tuple[float, float, float]:
        """Return drift ÷ budget and its interval."""
        values, _ = self.copy()
        ratio, low, high = (values[f"drift_budget_ratio{end}"][output, metric] for end in ("", "_low", "_high"))
        return ratio, low, high

    def judged_bounds(self) -> set[tuple[str, ...]]:
        """Return the outputs and metrics that have a ratio."""
        return set(self.copy()[0]["drift_budget_ratio"])

    def rows(self, output: str = "y") -> float:
        """Return how many rows the compared ones stand for."""
        return self.copy()[1]["drift_max_abs"][output,].counts[-1]
