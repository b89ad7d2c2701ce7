"""The metrics of a server: when series appear and disappear, how processes are added up, how they are exposed.

All metrics are in :mod:`bf16kit.service.telemetry.families`. The rest of the server reports events to
:class:`~bf16kit.service.telemetry.modelmetrics.ModelMetrics`. A model's series appear with value 0 when it is loaded,
start anew when another generation replaces it, and disappear when it is unloaded. Nothing that a client sends becomes a
label. Series are made from the plain values when they are exposed, in prometheus_client's types, which only this file
knows.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from functools import cache, partial
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client import exposition as plain
from prometheus_client.metrics_core import Metric as PrometheusMetric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar as PrometheusExemplar
from prometheus_client.utils import floatToGoString

from bf16kit.service.contract import StatisticsSnapshot
from bf16kit.service.peers.channel import Body
from bf16kit.service.peers.peer import when_received
from bf16kit.service.telemetry.families import METRICS, OF_SERVER, TraceOutcome
from bf16kit.service.telemetry.modelmetrics import ModelMetrics
from bf16kit.service.telemetry.values import (
    Exemplar,
    Histogram,
    Key,
    Value,
    Values,
    fell,
    from_message,
    merge,
    model_of,
)

# Wait for the processes' current counts; of those that are late, the last report counts.
ANSWER_SECONDS = 2.0
Version = tuple[str, int]  # a model's name and version
Ask = Callable[[], Mapping[str, Future[Body]]]  # returns every other process' answer, by its name


class Sample(NamedTuple):
    """One value of one series, under the name that is exposed, such as that of a histogram's bucket."""

    name: str
    labels: dict[str, str]
    value: float
    exemplar: Exemplar | None = None


class Metrics:
    """All models' metrics. Each server (and each test) needs its own."""

    def __init__(self) -> None:
        self._process = CollectorRegistry()  # of this process itself
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._process)
        self._lock = threading.Lock()  # guards all that follow
        self._models: dict[tuple[str, int], ModelMetrics] = {}
        self._counts = {(name, *labels): 0.0 for name, metric in OF_SERVER.items() for labels in metric.start}

    def add(self, model: str, version: int) -> ModelMetrics:
        """Create this model version's series, all with value 0, in place of existing ones.

        A holder of the replaced series may still count on them, but they are not exposed any more.
        """
        series = ModelMetrics(model, version)
        with self._lock:
            self._models.pop((model, version), None)
            self._models[model, version] = series
        return series

    def remove(self, series: ModelMetrics) -> None:
        """Remove these series, unless others have replaced them."""
        with self._lock:
            if self._models.get((series.model, series.version)) is series:
                del self._models[series.model, series.version]

    def traced(self, outcome: TraceOutcome, traces: int) -> None:
        """Count the outcome of traced requests."""
        self._count(traces, "traces_total", outcome)

    def worker_restarted(self) -> None:
        """Count a worker that has ended, and is started again."""
        self._count(1, "worker_restarts_total")

    def refused(self, reason: str) -> None:
        """Count a rejection before a model was known. An unknown reason counts as ``other``."""
        self._count(1, "refused_total", reason if ("refused_total", reason) in self._counts else "other")

    def values(self, prefix: str = "") -> Values:
        """Return all values whose names begin with ``prefix``, to be added to other processes'."""
        with self._lock:
            models = list(self._models.values())
            values: Values = {**self._counts}
        for model in models:
            values |= model.values()
        for family in self._process.collect():
            values |= {(each.name, *each.labels.values()): each.value for each in family.samples}
        return {key: value for key, value in values.items() if key[0].startswith(prefix)}

    def expose(self, accept: str = "", values: Values | None = None) -> tuple[bytes, str]:
        """Return the metrics in the format that an Accept header requests, and their content type.

        ``values`` are a whole server's; without them, this process' own are exposed.
        """
        exposed = _Exposed(self._process, self.values() if values is None else values)
        if "application/openmetrics-text" in accept:
            return openmetrics.generate_latest(exposed), openmetrics.CONTENT_TYPE_LATEST  # type: ignore[no-untyped-call]
        return plain.generate_latest(exposed), plain.CONTENT_TYPE_PLAIN_0_0_4

    def _count(self, amount: float, *key: str) -> None:
        with self._lock:
            self._counts[key] += amount


class Counting:
    """Adds up the counts of all processes when somebody reads them.

    ``own`` are this process' metrics. ``ask`` requests the counts of the others, which :meth:`receive` receives.
    ``served`` returns the versions that are served. When a process dies, its gauges disappear. What it had counted
    until its last report stays, so that no counter falls; what it counted after that is lost.
    """

    def __init__(self, own: Metrics, ask: Ask, served: Callable[[], Iterable[Version]]) -> None:
        self._own = own
        self._ask = ask
        self._served = served
        self._lock = threading.Lock()
        self._latest: dict[str, Values] = {}  # by process
        self._kept: Values = {}  # counts of processes that died, and of versions that a process has loaded anew

    def receive(self, process: str, report: Mapping[str, Any]) -> None:
        """Take over what ``process`` has counted so far. Reports must come in the order they were sent."""
        newest = from_message(report["metrics"])
        with self._lock:
            self._kept = merge([self._kept, fell(self._latest.get(process, {}), newest)])
            self._latest[process] = newest

    def process_died(self, process: str) -> None:
        """Note that the process died. Its counts are kept."""
        with self._lock:
            self._kept = merge([self._kept, fell(self._latest.pop(process, {}), {})])

    def forget(self, model: str, versions: Collection[int]) -> None:
        """Forget the counts of versions that all processes have reloaded or unloaded, which start anew."""
        gone = {(model, str(version)) for version in versions}
        with self._lock:
            self._kept = {key: value for key, value in self._kept.items() if model_of(key) not in gone}

    def expose(self, accept: str = "") -> tuple[bytes, str]:
        """See :meth:`Metrics.expose`; asks for current counts first."""
        return self._own.expose(accept, self._values())

    def samples(self) -> Iterator[Sample]:
        """Yield all current samples; asks for current counts first."""
        return samples(self._values())

    def statistics(self) -> Mapping[Version, StatisticsSnapshot]:
        """Return the statistics of every version; asks for current ones first."""
        found = self._values().items()
        return {(key[1], int(key[2])): value for key, value in found if isinstance(value, StatisticsSnapshot)}

    def _values(self) -> Values:
        wait(
            [when_received(answer, partial(self.receive, process)) for process, answer in self._ask().items()],
            ANSWER_SECONDS,
        )
        with self._lock:
            live = {model_of(key) for values in self._latest.values() for key in values}
            known = live | {None} | {(name, str(version)) for name, version in self._served()}
            self._kept = {key: value for key, value in self._kept.items() if model_of(key) in known}
            return merge([self._own.values(), self._kept, *self._latest.values()])


def samples(values: Values) -> Iterator[Sample]:
    """Yield the samples of all values that are metrics of models or of the server."""
    for key, value in values.items():
        if key[0] in METRICS:
            yield from _samples(key, value)


def _samples(key: Key, value: Value) -> Iterator[Sample]:
    name, metric = f"bf16kit_{key[0]}", METRICS[key[0]]
    labels = dict(zip(metric.labels, key[1:], strict=True))
    if isinstance(value, Histogram):
        counts = value.counts()
        for at, (limit, count) in enumerate(zip(_limits(metric.buckets), counts, strict=True)):
            yield Sample(f"{name}_bucket", {**labels, "le": limit}, count, value.exemplars.get(at))
        yield Sample(f"{name}_count", labels, counts[-1])
        yield Sample(f"{name}_sum", labels, value.total)
    elif isinstance(value, float):
        yield Sample(name, labels, value)


@cache
def _limits(bounds: tuple[float, ...]) -> tuple[str, ...]:
    """Return the bounds of a histogram's buckets, the infinite one included, as prometheus_client writes its own."""
    return tuple(floatToGoString(bound) for bound in (*bounds, math.inf))  # type: ignore[no-untyped-call]


class _Exposed(Collector):
    """A collector of these values, in prometheus_client's types. ``process`` says what the process' own metrics are."""

    def __init__(self, process: CollectorRegistry, values: Values) -> None:
        self._process = process
        self._values = values

    def collect(self) -> Iterator[PrometheusMetric]:
        found: dict[str, list[Key]] = {}
        for key in self._values:
            found.setdefault(key[0], []).append(key)
        for name, metric in METRICS.items():
            family = PrometheusMetric(f"bf16kit_{name.removesuffix('_total')}", metric.text, metric.kind)
            for key in found.get(name, ()):
                for sample in _samples(key, self._values[key]):
                    family.add_sample(*sample[:3], exemplar=_exemplar(sample.exemplar))
            yield family
        for own in self._process.collect():
            family = PrometheusMetric(own.name, own.documentation, own.type)
            for each in own.samples:
                value = self._values.get((each.name, *each.labels.values()))
                family.add_sample(each.name, each.labels, value if isinstance(value, float) else each.value)
            yield family


def _exemplar(found: Exemplar | None) -> PrometheusExemplar | None:
    return None if found is None else PrometheusExemplar({"trace_id": found.trace}, found.value, found.timestamp)
