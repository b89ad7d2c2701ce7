"""One reading of the server's metrics, sorted by model, of which :mod:`service.telemetry.history` stores the growth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from service.request import REFUSALS
from service.telemetry import families as vocabulary
from service.telemetry.livedrift import LABELS

_OTHER = "other"
CODES = (*vocabulary.CODES, _OTHER)
HISTOGRAMS = tuple(f"bf16kit_{phase}_duration_seconds" for phase in ("request", "queue", "compute"))
RATIO, BASELINE = "bf16kit_drift_budget_ratio", "bf16kit_drift_baseline"
DEPTH, IN_FLIGHT = "bf16kit_queue_depth", "bf16kit_requests_in_flight"
_REFUSED = "bf16kit_refused_total"

#: The samples that a source must provide. Of histograms, sums and buckets suffice.
NAMES = (
    "bf16kit_requests_total",
    "bf16kit_rejected_total",
    "bf16kit_drift_samples_total",
    "bf16kit_rows_total",
    "bf16kit_executions_total",
    *(f"{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum")),
    *(RATIO, BASELINE, DEPTH, IN_FLIGHT, _REFUSED),
    *LABELS,
)

Totals = NDArray[np.float64]
Key = tuple[str, str]  # model, version


class Sample(Protocol):
    """One value of one series, as every Prometheus client represents it."""

    @property
    def name(self) -> str: ...
    @property
    def labels(self) -> Mapping[str, str]: ...
    @property
    def value(self) -> float: ...


Source = Callable[[], Iterable[Sample]]


class Layout:
    """The columns of a row of counters."""

    def __init__(self) -> None:
        groups = (
            ("bf16kit_requests_total", "code", CODES),
            ("bf16kit_rejected_total", "reason", vocabulary.REJECTIONS),
            ("bf16kit_drift_samples_total", "outcome", vocabulary.OUTCOMES),
        )
        self.columns: dict[tuple[str, str], int] = {}
        self.parts: dict[str, slice] = {}
        self._label: dict[str, str] = {}
        for name, label, values in groups:
            self._label[name] = label
            self._append(name, values)
        for name in ("bf16kit_rows_total", "bf16kit_executions_total"):
            self._append(name, ("",))
        for name in HISTOGRAMS:
            self._label[f"{name}_bucket"] = "le"
            self._append(f"{name}_bucket", (*map(str, vocabulary.SECONDS), "+Inf"))
            self._append(f"{name}_sum", ("",))
        self.size = len(self.columns)

    def _append(self, name: str, values: Sequence[str]) -> None:
        begin = len(self.columns)
        for value in values:
            self.columns[name, value] = len(self.columns)
        self.parts[name] = slice(begin, len(self.columns))

    def column(self, name: str, labels: Mapping[str, str]) -> int | None:
        """Return the column that counts this series; None if it is not kept."""
        label = self._label.get(name)
        value = "" if label is None else labels.get(label, "")
        at = self.columns.get((name, value))
        if at is None and label == "code":
            return self.columns[name, _OTHER]
        if at is None and label == "le":  # 1.0 may be written as 1
            return self.columns.get((name, str(float(value))))
        return at


LAYOUT = Layout()


class Reading:
    """One reading of the source, sorted by model."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self.totals: dict[Key, Totals] = {}
        self.gauges: dict[Key, dict[str, int]] = {}
        self.drift: dict[Key, dict[str, dict[str, dict[str, float]]]] = {}
        self.live: dict[Key, dict[str, dict[tuple[str, ...], float]]] = {}
        self.refused = np.zeros(len(REFUSALS))
        for sample in samples:
            self._add(sample.name, sample.labels, sample.value)

    def _add(self, name: str, labels: Mapping[str, str], value: float) -> None:
        if name == _REFUSED:
            if (reason := labels["reason"]) in REFUSALS:
                self.refused[REFUSALS.index(reason)] += value
            return
        if "model" not in labels:
            return
        key = labels["model"], labels["version"]
        row = self.totals.get(key)
        if row is None:
            row = self.totals[key] = np.zeros(LAYOUT.size)
        if name in (RATIO, BASELINE):
            drift = self.drift.setdefault(key, {RATIO: {}, BASELINE: {}})
            drift[name].setdefault(labels["output"], {})[labels["metric"]] = vocabulary.finite(value)
        elif name in (DEPTH, IN_FLIGHT):
            self.gauges.setdefault(key, {})[name] = round(value)
        elif name in LABELS:
            of = tuple(labels[label] for label in LABELS[name])
            self.live.setdefault(key, {}).setdefault(name, {})[of] = value
        elif (column := LAYOUT.column(name, labels)) is not None:
            row[column] += value

    def ratio(self, key: Key) -> float:
        """Return this model's highest recent drift ÷ budget; NaN if nothing was measured."""
        ratios = self.drift.get(key, {}).get(RATIO, {})
        return max((ratio for metrics in ratios.values() for ratio in metrics.values()), default=np.nan)
