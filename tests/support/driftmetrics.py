"""A model's metrics of live drift, as a scrape of them says."""

from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families

from bf16kit.numerics.tensors import TensorSpec
from bf16kit.service.telemetry.metrics import Metrics


class DriftMetrics:
    """The metrics of one model with these outputs: ``model`` receives events. Names are without ``bf16kit_drift_``."""

    def __init__(self, *outputs: TensorSpec) -> None:
        self._metrics = Metrics()
        self.model = self._metrics.add("m", 1)
        self.model.opened(0, outputs)

    def value(self, name: str, **labels: str) -> float | None:
        """Return a series' value; None if there is no such series."""
        return next((value for found, value in self._series(name) if found == labels), None)

    def values(self, label: str, *names: str) -> dict[tuple[str, str], float]:
        """Return the series of ``names`` from one scrape: by name, and by the value of ``label`` or ""."""
        found = {(name, labels.get(label, "")): value for name, labels, value in self._scrape()}
        return {key: value for key, value in found.items() if key[0] in names}

    def ratio(self, metric: str, output: str = "y") -> tuple[float, ...]:
        """Return drift ÷ budget and its interval."""
        found = (self.value(f"budget_ratio{end}", output=output, metric=metric) for end in ("", "_low", "_high"))
        return tuple(value for value in found if value is not None)

    def judged_bounds(self) -> set[tuple[str, str]]:
        """Return the outputs and metrics that have a ratio."""
        return {(labels["output"], labels["metric"]) for labels, _ in self._series("budget_ratio")}

    def rows(self, output: str = "y") -> float | None:
        """Return how many rows the compared ones stand for."""
        return self.value("max_abs_count", output=output)

    def _series(self, name: str) -> Iterator[tuple[dict[str, str], float]]:
        return ((labels, value) for found, labels, value in self._scrape() if found == name)

    def _scrape(self) -> Iterator[tuple[str, dict[str, str], float]]:
        for family in text_string_to_metric_families(self._metrics.expose()[0].decode()):
            for sample in family.samples:
                labels = sample.labels.items() - {("model", "m"), ("version", "1")}
                yield sample.name.removeprefix("bf16kit_drift_"), dict(labels), sample.value
