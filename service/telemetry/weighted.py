"""A histogram of weighted observations: each counts as the number of rows that it stands for.

prometheus_client's own histogram counts every observation once. A sample taken with probability p stands for 1 ÷ p rows
(Horvitz and Thompson, J. Am. Stat. Assoc. 47, 1952). The histogram thus estimates the distribution over all answered
rows, however unevenly they were sampled.
"""

from __future__ import annotations

import bisect
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class WeightedSeries:
    """The histogram of one set of labels."""

    def __init__(self, bounds: Sequence[float], lock: threading.Lock) -> None:
        self._bounds = bounds  # the last is infinite
        self._lock = lock
        self._weights = [0.0] * len(bounds)
        self._sum = 0.0

    def observe(self, amount: float, weight: float) -> None:
        """Observe ``amount``, at least 0, with ``weight`` rows, which may be a fraction."""
        with self._lock:
            self._weights[bisect.bisect_left(self._bounds, amount)] += weight
            self._sum += amount * weight

    def snapshot(self) -> tuple[list[tuple[str, float]], float]:
        """Return the cumulative buckets, as (bound, count), and the sum.

        OpenMetrics requires whole counts. Each is rounded only here, so it is off by at most half a row and never
        falls.
        """
        with self._lock:
            weights, total = list(self._weights), self._sum
        below, buckets = 0.0, []
        for bound, weight in zip(self._bounds, weights, strict=True):
            below += weight
            name = floatToGoString(bound)  # type: ignore[no-untyped-call]  # as prometheus_client writes its own
            buckets.append((name, float(math.floor(below + 0.5))))
        return buckets, total


class WeightedHistogram(Collector):
    """A counterpart of :class:`prometheus_client.Histogram` whose series are :class:`WeightedSeries`."""

    def __init__(
        self, name: str, text: str, labels: Iterable[str], *, registry: CollectorRegistry, buckets: Iterable[float]
    ) -> None:
        self._name, self._text, self._labels = name, text, tuple(labels)
        self._bounds = (*buckets, math.inf)
        self._lock = threading.Lock()
        self._series: dict[tuple[str, ...], WeightedSeries] = {}
        registry.register(self)

    def labels(self, *values: str) -> WeightedSeries:
        """Return the series with these label values, creating it if necessary."""
        if len(values) != len(self._labels):
            raise ValueError(f"{self._name}: values {values} of labels {self._labels}")
        with self._lock:
            return self._series.setdefault(values, WeightedSeries(self._bounds, self._lock))

    def remove_by_labels(self, labels: Mapping[str, str]) -> None:
        """Remove every series with these label values."""
        wanted = [(self._labels.index(name), value) for name, value in labels.items()]
        with self._lock:
            self._series = {
                values: series
                for values, series in self._series.items()
                if not all(values[at] == value for at, value in wanted)
            }

    def describe(self) -> Iterable[Metric]:
        """Return the family without series, from which the registry learns its names."""
        return [HistogramMetricFamily(self._name, self._text, labels=self._labels)]

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        with self._lock:
            present = list(self._series.items())
        for values, series in present:
            buckets, total = series.snapshot()
            family.add_metric(values, buckets, total)
        yield family
