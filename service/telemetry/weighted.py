"""A histogram of weighted observations: each counts as the rows that it speaks for.

prometheus_client's own counts every observation once. A sample that was taken with probability p speaks for 1 ÷ p rows
(Horvitz and Thompson, J. Am. Stat. Assoc. 47, 1952), so that what is estimated is the distribution over all rows that
were answered, however unevenly they were sampled.
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
        """``amount`` is that of ``weight`` rows, at least 0; they need not be whole."""
        with self._lock:
            self._weights[bisect.bisect_left(self._bounds, amount)] += weight
            self._sum += amount * weight

    def told(self) -> tuple[list[tuple[str, float]], float]:
        """The buckets, each with all that lie below its bound, and the sum.

        OpenMetrics wants whole counts: each is rounded when it is told, so that it is never off by more than half a row
        and never falls.
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
    """What :class:`prometheus_client.Histogram` is, of :class:`WeightedSeries`."""

    def __init__(
        self, name: str, text: str, labels: Iterable[str], *, registry: CollectorRegistry, buckets: Iterable[float]
    ) -> None:
        self._name, self._text, self._labels = name, text, tuple(labels)
        self._bounds = (*buckets, math.inf)
        self._lock = threading.Lock()
        self._series: dict[tuple[str, ...], WeightedSeries] = {}
        registry.register(self)

    def labels(self, *values: str) -> WeightedSeries:
        """The series of these values, which is there from now on."""
        if len(values) != len(self._labels):
            raise ValueError(f"{self._name}: values {values} of labels {self._labels}")
        with self._lock:
            return self._series.setdefault(values, WeightedSeries(self._bounds, self._lock))

    def remove_by_labels(self, labels: Mapping[str, str]) -> None:
        """Remove every series that has these labels."""
        wanted = [(self._labels.index(name), value) for name, value in labels.items()]
        with self._lock:
            self._series = {
                values: series
                for values, series in self._series.items()
                if not all(values[at] == value for at, value in wanted)
            }

    def describe(self) -> Iterable[Metric]:
        """The family without series: how the registry knows its names."""
        return [HistogramMetricFamily(self._name, self._text, labels=self._labels)]

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        with self._lock:
            present = list(self._series.items())
        for values, series in present:
            buckets, total = series.told()
            family.add_metric(values, buckets, total)
        yield family
