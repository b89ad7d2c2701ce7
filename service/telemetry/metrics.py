"""The metrics of a server: when their series appear and disappear, and how they are exposed.

The families are in :mod:`service.telemetry.families`. The rest of the server reports events to
:class:`~service.telemetry.modelmetrics.ModelMetrics`. A model's series appear with value 0 when it is loaded, start
anew when another generation replaces it, and disappear when it is unloaded. Nothing that a client sends becomes a
label.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar as PrometheusExemplar
from prometheus_client.samples import Sample, Timestamp

from service.request import REFUSALS
from service.telemetry import vocabulary
from service.telemetry.families import Families, FamilyFactory
from service.telemetry.merged import Exemplar, Family, Mode, Series
from service.telemetry.modelmetrics import Changes, ModelMetrics


class Metrics:
    """All models' metrics on one registry. Each server (and each test) needs its own."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._registry = registry or CollectorRegistry()
        self._process = CollectorRegistry()  # of this process itself
        self._changes = Changes()
        factory = FamilyFactory(self._registry)
        self._modes, self._families = factory.modes, Families(factory)
        self._models: dict[tuple[str, int], ModelMetrics] = {}
        refused = Counter(
            "bf16kit_refused_total",
            "Requests rejected before they reached a model.",
            ["reason"],
            registry=self._registry,
        )
        self._refused = {reason: refused.labels(reason) for reason in REFUSALS}
        traced = Counter(
            "bf16kit_traces_total", "Traced requests, by outcome of the export.", ["outcome"], registry=self._registry
        )
        self._traced = {outcome: traced.labels(outcome) for outcome in vocabulary.TRACE_OUTCOMES}
        self._worker_restarts = Counter(
            "bf16kit_worker_restarts_total", "Workers that ended and were replaced.", registry=self._registry
        )
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._process)

    def add(self, model: str, version: int) -> ModelMetrics:
        """Create this model version's series, all with value 0, in place of existing ones.

        A holder of the replaced series may still count on them, but they are not exposed any more.
        """
        self._drop(model, version)
        series = self._models[model, version] = ModelMetrics(self._families, model, version, self._changes)
        self._changes.pending = True
        return series

    def remove(self, series: ModelMetrics) -> None:
        """Remove these series, unless others have replaced them."""
        if self._models.get((series.model, series.version)) is series:
            self._drop(series.model, series.version)

    def _drop(self, model: str, version: int) -> None:
        series = self._models.pop((model, version), None)
        if series is not None:
            with self._changes.lock:
                series.exposed = False
                for family in self._families.all():
                    family.remove_by_labels({"model": model, "version": str(version)})
            self._changes.pending = True

    def traced(self, outcome: vocabulary.TraceOutcome, traces: int) -> None:
        """Count the outcome of traced requests."""
        self._traced[outcome].inc(traces)
        self._changes.pending = True

    def worker_restarted(self) -> None:
        """Count a worker that has ended, and is started again."""
        self._worker_restarts.inc()
        self._changes.pending = True

    def refused(self, reason: str) -> None:
        """Count a rejection before a model was known. A reason outside :data:`REFUSALS` counts as ``other``."""
        self._refused.get(reason, self._refused["other"]).inc()
        self._changes.pending = True

    def samples(self, names: Iterable[str]) -> Iterator[Sample]:
        """Yield the current samples of these names. Much cheaper than :meth:`expose`."""
        for family in self._registry.restricted_registry(names).collect():
            yield from family.samples

    def snapshot(self, prefix: str = "") -> list[Family]:
        """Return all families whose names begin with ``prefix``, to be added to other processes'."""
        return self._snapshot(prefix, self._registry, self._process)

    def report(self, prefix: str = "") -> tuple[list[Family], bool]:
        """Return :meth:`snapshot`, and whether it is complete.

        If nothing has changed since the last call, it has only the families of the process itself.
        """
        if self._changes.take():
            return self.snapshot(prefix), True
        return self._snapshot(prefix, self._process), False

    def _snapshot(self, prefix: str, *registries: CollectorRegistry) -> list[Family]:
        return [
            _family(metric, self._modes.get(metric.name, "sum"))
            for metric in _WithoutCreationTimes(*registries).collect()
            if metric.name.startswith(prefix)
        ]

    def expose(self, accept: str = "") -> tuple[bytes, str]:
        """Return the metrics in the format that an Accept header requests, and their content type.

        An invalid Accept header is treated as a missing one.
        """
        return _encoded(_WithoutCreationTimes(self._registry, self._process), accept)


def expose(families: Iterable[Family], accept: str = "") -> tuple[bytes, str]:
    """Like :meth:`Metrics.expose`, for families that were added up."""
    return _encoded(_FamilyCollector(list(families)), accept)


def _encoded(collector: Collector, accept: str) -> tuple[bytes, str]:
    encode, content_type = _encoder(accept)
    return encode(collector), content_type


def _family(metric: Metric, mode: Mode) -> Family:
    series = []
    for sample in metric.samples:
        source = sample.exemplar
        exemplar = None if source is None else Exemplar(dict(source.labels), source.value, _seconds(source.timestamp))
        series.append(Series(sample.name, dict(sample.labels), sample.value, exemplar))
    return Family(metric.name, metric.type, metric.documentation, mode, series)


def _seconds(timestamp: float | Timestamp | None) -> float | None:
    return None if timestamp is None else float(timestamp)


class _FamilyCollector(Collector):
    """A collector of given families, in prometheus_client's types."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.text, family.kind)
            for name, labels, value, source in family.series:
                exemplar = None if source is None else PrometheusExemplar(source.labels, source.value, source.timestamp)
                metric.add_sample(name, labels, value, exemplar=exemplar)
            yield metric


def _encoder(accept: str) -> tuple[Callable[[Collector], bytes], str]:
    """Return prometheus_client's encoder and content type.

    It echoes the requested version, and fails if that is no number.
    """
    try:
        encode, content_type = choose_encoder(accept)
    except (ValueError, AttributeError, TypeError, IndexError):
        return choose_encoder("")
    known = re.fullmatch(
        r"[a-z/-]+(; (version=\d+(\.\d+){1,2}|charset=utf-8|escaping=[a-z-]+))*", content_type, re.ASCII
    )
    return (encode, content_type) if known else choose_encoder("")


class _WithoutCreationTimes(Collector):
    """Registries without the ``…_created`` series, which double their size and tell an operator nothing."""

    def __init__(self, *registries: CollectorRegistry) -> None:
        self._registries = registries

    def collect(self) -> Iterator[Metric]:
        for family in chain.from_iterable(registry.collect() for registry in self._registries):
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
