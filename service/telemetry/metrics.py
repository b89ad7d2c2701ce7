"""The metrics of a server: when their series appear and disappear, and how they are exposed.

All metrics are in :mod:`service.telemetry.families`. The rest of the server reports events to
:class:`~service.telemetry.modelmetrics.ModelMetrics`. A model's series appear with value 0 when it is loaded, start
anew when another generation replaces it, and disappear when it is unloaded. Nothing that a client sends becomes a
label. Series are made from the plain values when they are collected, in prometheus_client's types, which only this file
knows.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as PrometheusMetric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar as PrometheusExemplar
from prometheus_client.utils import floatToGoString

from service.telemetry.families import OF_MODEL, OF_SERVER, Metric, TraceOutcome
from service.telemetry.merged import Family, Mode, Series
from service.telemetry.modelmetrics import Buckets, Labels, ModelMetrics

# How to combine those gauges of prometheus_client's own collectors that are not summed. All others are: a server's
# memory, for example, is the sum over its processes.
_PROCESS_MODES: Mapping[str, Mode] = {
    "process_start_time_seconds": "min",
    "process_max_fds": "min",
    "python_info": "max",
}


class Metrics:
    """All models' metrics. Each server (and each test) needs its own."""

    def __init__(self) -> None:
        self._process = CollectorRegistry()  # of this process itself
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._process)
        self._lock = threading.Lock()  # guards all that follow
        self._changed = True  # a model came or went, or a count of the server changed
        self._models: dict[tuple[str, int], ModelMetrics] = {}
        self._counts: dict[str, dict[Labels, float]] = {
            name: {(value,) if metric.labels else (): 0.0 for value in metric.values}
            for name, metric in OF_SERVER.items()
        }

    def add(self, model: str, version: int) -> ModelMetrics:
        """Create this model version's series, all with value 0, in place of existing ones.

        A holder of the replaced series may still count on them, but they are not exposed any more.
        """
        series = ModelMetrics(model, version)
        with self._lock:
            self._models.pop((model, version), None)
            self._models[model, version] = series
            self._changed = True
        return series

    def remove(self, series: ModelMetrics) -> None:
        """Remove these series, unless others have replaced them."""
        with self._lock:
            if self._models.get((series.model, series.version)) is series:
                del self._models[series.model, series.version]
                self._changed = True

    def traced(self, outcome: TraceOutcome, traces: int) -> None:
        """Count the outcome of traced requests."""
        self._count("traces_total", traces, outcome)

    def worker_restarted(self) -> None:
        """Count a worker that has ended, and is started again."""
        self._count("worker_restarts_total", 1)

    def refused(self, reason: str) -> None:
        """Count a rejection before a model was known. An unknown reason counts as ``other``."""
        self._count("refused_total", 1, reason if (reason,) in self._counts["refused_total"] else "other")

    def samples(self, names: Iterable[str]) -> Iterator[Series]:
        """Yield the current samples of these names. Cheaper than :meth:`expose`."""
        wanted = set(names)
        for family in self._families(wanted):
            yield from (series for series in family.series if series.name in wanted)

    def snapshot(self, prefix: str = "") -> list[Family]:
        """Return all families whose names begin with ``prefix``, to be added to other processes'."""
        families = [*self._families(), *self._of_process()]
        return [family for family in families if family.name.startswith(prefix)]

    def report(self, prefix: str = "") -> tuple[list[Family], bool]:
        """Return :meth:`snapshot`, and whether it is complete.

        If nothing has changed since the last call, it has only the families of the process itself: collecting those of
        an idle model takes a part of a millisecond, and merging them more.
        """
        with self._lock:
            changed, self._changed = self._changed, False
            models = list(self._models.values())
        changed |= any([model.take_changed() for model in models])  # noqa: C419 -- of each of them
        if changed:
            return self.snapshot(prefix), True
        return [family for family in self._of_process() if family.name.startswith(prefix)], False

    def expose(self, accept: str = "") -> tuple[bytes, str]:
        """Return the metrics in the format that an Accept header requests, and their content type.

        An invalid Accept header is treated as a missing one.
        """
        return expose(self.snapshot(), accept)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _count(self, name: str, amount: float, *labels: str) -> None:
        with self._lock:
            self._counts[name][labels] += amount
            self._changed = True

    def _families(self, names: Collection[str] | None = None) -> Iterator[Family]:
        """Yield the families; with ``names``, those that may have samples of these names."""
        with self._lock:
            models = list(self._models.values())
            counts = {name: dict(series) for name, series in self._counts.items()}
        copied = [({"model": model.model, "version": str(model.version)}, *model.copy()) for model in models]
        for name, metric in OF_MODEL.items():
            if names is not None and not any(each.startswith(f"bf16kit_{name}") for each in names):
                continue
            series: list[Series] = []
            for of_model, values, histograms in copied:
                for labels, value in values.get(name, {}).items():
                    series.append(_series(name, metric, of_model, labels, value))
                for labels, buckets in histograms.get(name, {}).items():
                    series += _bucket_series(name, metric, of_model, labels, buckets)
            yield _family(name, metric, series)
        for name, metric in OF_SERVER.items():
            yield _family(
                name, metric, [_series(name, metric, {}, labels, value) for labels, value in counts[name].items()]
            )

    def _of_process(self) -> Iterator[Family]:
        for metric in self._process.collect():
            series = [Series(each.name, dict(each.labels), each.value) for each in metric.samples]
            mode = _PROCESS_MODES.get(metric.name, "sum")
            yield Family(metric.name, metric.type, metric.documentation, mode, series)


def expose(families: Iterable[Family], accept: str = "") -> tuple[bytes, str]:
    """Return families as :meth:`Metrics.expose` does."""
    encode, content_type = _encoder(accept)
    return encode(_FamilyCollector(families)), content_type


def _family(name: str, metric: Metric, series: list[Series]) -> Family:
    return Family(f"bf16kit_{name.removesuffix('_total')}", metric.kind, metric.text, metric.mode, series)


def _series(name: str, metric: Metric, of_model: Mapping[str, str], labels: Labels, value: float) -> Series:
    return Series(f"bf16kit_{name}", {**of_model, **dict(zip(metric.labels, labels, strict=True))}, value)


def _bucket_series(
    name: str, metric: Metric, of_model: Mapping[str, str], labels: Labels, buckets: Buckets
) -> Iterator[Series]:
    named = {**of_model, **dict(zip(metric.labels, labels, strict=True))}
    for at, (limit, count) in enumerate(zip(_limits(metric.buckets), buckets.counts, strict=True)):
        yield Series(f"bf16kit_{name}_bucket", {**named, "le": limit}, count, buckets.exemplars.get(at))
    yield Series(f"bf16kit_{name}_count", named, buckets.counts[-1])
    yield Series(f"bf16kit_{name}_sum", named, buckets.total)


@cache
def _limits(bounds: tuple[float, ...]) -> tuple[str, ...]:
    """Return the bounds of a histogram's buckets, the infinite one included, as prometheus_client writes its own."""
    return tuple(floatToGoString(bound) for bound in (*bounds, math.inf))  # type: ignore[no-untyped-call]


class _FamilyCollector(Collector):
    """A collector of given families, in prometheus_client's types."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[PrometheusMetric]:
        for family in self._families:
            metric = PrometheusMetric(family.name, family.text, family.kind)
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
