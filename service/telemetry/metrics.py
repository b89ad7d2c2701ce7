"""Every metric of the server, and the moments its series appear and go: the one file that knows Prometheus.

The rest of the server calls :class:`ModelMetrics`, whose methods say what happened. Series of a model appear with value
0 when it is loaded, start anew when another generation takes its place, and go when it is unloaded; nothing a caller
sends ever becomes a label.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar as PrometheusExemplar
from prometheus_client.samples import Sample, Timestamp

from bf16kit.drift import SampleDrift
from bf16kit.runtime import RuntimeInfo
from bf16kit.tensors import TensorSpec
from service.request import REFUSALS, Observation
from service.telemetry import vocabulary as words
from service.telemetry.whole import Exemplar, Family, Mode, Series

_MODEL = ("model", "version")
# Of the process' own gauges; the others are sums: a server's memory is that of all of its processes.
_PROCESS_MODES: Mapping[str, Mode] = {
    "process_start_time_seconds": "min",
    "process_max_fds": "min",
    "python_info": "max",
}
_Child = TypeVar("_Child", Counter, Gauge, Histogram)


class _Maker:
    """Makes the families of one registry, all of them with the model's labels."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.modes: dict[str, Mode] = dict(_PROCESS_MODES)  # how several processes' gauges combine, by name

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"bf16kit_{name}", text, (*_MODEL, *labels), registry=self._registry)

    def gauge(self, name: str, text: str, *labels: str, mode: Mode) -> Gauge:
        self.modes[f"bf16kit_{name}"] = mode
        return Gauge(f"bf16kit_{name}", text, (*_MODEL, *labels), registry=self._registry)

    def histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"bf16kit_{name}", text, (*_MODEL, *labels), registry=self._registry, buckets=buckets)


class _Families:
    """The metrics of design §8, registered once per process. Gauges say how several workers' values combine."""

    def __init__(self, make: _Maker) -> None:
        self._of_requests(make)
        self._of_models(make)
        self._of_drift(make)

    def _of_requests(self, make: _Maker) -> None:
        counter, gauge, histogram = make.counter, make.gauge, make.histogram
        self.requests = counter("requests_total", "Requests answered, by gRPC status code.", "code")
        self.rows = counter("rows_total", "Rows run: the sum of all batch sizes.")
        self.executions = counter("executions_total", "Batches run.")
        self.rejected = counter("rejected_total", "Requests refused or dropped before they ran.", "reason")
        self.request_seconds = histogram("request_duration_seconds", "From arrival to encoded answer.", words.SECONDS)
        self.queue_seconds = histogram("queue_duration_seconds", "What a request waited for its batch.", words.SECONDS)
        self.compute_seconds = histogram("compute_duration_seconds", "What one batch took to run.", words.SECONDS)
        self.batch_rows = histogram("batch_rows", "Rows in one batch.", words.ROWS)
        self.queue_depth = gauge("queue_depth", "Requests waiting for a batch.", mode="sum")
        self.in_flight = gauge("requests_in_flight", "Requests waiting or running.", mode="sum")

    def _of_models(self, make: _Maker) -> None:
        counter, gauge = make.counter, make.gauge
        self.ready = gauge("model_ready", "1 when the model answers, else 0.", mode="min")
        self.load_seconds = gauge("model_load_seconds", "From opening the artifact to ready.", mode="max")
        self.weight_bytes = gauge("model_weight_bytes", "Stored weights that the model maps.", mode="max")
        self.info = gauge(
            "model_info", "1; how the model really runs, in the labels.",
            "backend", "device", "profile", "precision", "accumulation", mode="max",
        )  # fmt: skip
        self.fallback_active = gauge("fallback_active", "1 while fp32 answers instead of bf16.", mode="max")
        self.fallback_transitions = counter("fallback_transitions_total", "Changes of precision.", "to")

    def _of_drift(self, make: _Maker) -> None:
        counter, gauge, histogram = make.counter, make.gauge, make.histogram
        self.relative_l2 = histogram("drift_relative_l2", "Live drift of one sample.", words.RELATIVE_L2, "output")
        self.cosine = histogram("drift_cosine_distance", "Live drift of one sample.", words.COSINE, "output")
        self.max_abs = histogram("drift_max_abs", "Live drift of one sample.", words.MAX_ABS, "output")
        self.top1_matches = counter("drift_top1_matches_total", "Rows of logits with the reference's top.", "output")
        self.top1_rows = counter("drift_top1_rows_total", "Rows of logits compared.", "output")
        self.nonfinite = counter("drift_nonfinite_total", "Elements not finite where the reference's are.", "output")
        self.samples = counter("drift_samples_total", "Samples taken from live requests, by outcome.", "outcome")
        self.budget_ratio = gauge(
            "drift_budget_ratio", "Recent drift as a share of its budget; over 1 is a breach.",
            "output", "metric", mode="max",
        )  # fmt: skip
        self.baseline = gauge("drift_baseline", "Drift measured at conversion.", "output", "metric", mode="max")

    def all(self) -> Iterable[Counter | Gauge | Histogram]:
        families: dict[str, Counter | Gauge | Histogram] = vars(self)
        return families.values()


@dataclass(frozen=True, slots=True)
class _OutputSeries:
    relative_l2: Histogram
    cosine: Histogram
    max_abs: Histogram
    nonfinite: Counter
    top1: tuple[Counter, Counter] | None  # matches, rows; for logits only


class ModelMetrics:
    """The series of one generation of a model version, looked up once so that a request pays for none of it."""

    def __init__(self, families: _Families, model: str, version: int) -> None:
        self.model, self.version = model, version
        self.exposed = True  # False once other series have taken their place, or the model is unloaded
        self._families = families
        self._labels = (model, str(version))
        f = families
        self._requests = {code: self._of(f.requests, code) for code in words.CODES}
        self._rejected = {reason: self._of(f.rejected, reason) for reason in words.REJECTIONS}
        self._samples = {outcome: self._of(f.samples, outcome) for outcome in words.OUTCOMES}
        self._rows, self._executions = self._of(f.rows), self._of(f.executions)
        self._request_seconds, self._queue_seconds = self._of(f.request_seconds), self._of(f.queue_seconds)
        self._compute_seconds, self._batch_rows = self._of(f.compute_seconds), self._of(f.batch_rows)
        # Bound methods, not methods of ours: these run once or twice for every request.
        self.queued = self._of(f.queue_depth).inc
        self.in_flight = self._of(f.in_flight).inc
        self._ready, self._load_seconds = self._of(f.ready), self._of(f.load_seconds)
        self._weight_bytes = self._of(f.weight_bytes)
        self._outputs: dict[str, _OutputSeries] = {}
        self._of(f.fallback_active)
        for precision in ("fp32", "bf16"):
            self._of(f.fallback_transitions, precision)

    def _of(self, family: _Child, *labels: str) -> _Child:
        return family.labels(*self._labels, *labels)

    # --- loading ------------------------------------------------------------------------------------------------------

    def opened(self, weight_bytes: int, outputs: Iterable[TensorSpec]) -> None:
        """The artifact is open: its outputs are known."""
        self._weight_bytes.set(weight_bytes)
        f = self._families
        for spec in outputs:
            logits = spec.kind == "logits"
            self._outputs[spec.name] = _OutputSeries(
                relative_l2=self._of(f.relative_l2, spec.name),
                cosine=self._of(f.cosine, spec.name),
                max_abs=self._of(f.max_abs, spec.name),
                nonfinite=self._of(f.nonfinite, spec.name),
                top1=(self._of(f.top1_matches, spec.name), self._of(f.top1_rows, spec.name)) if logits else None,
            )

    def loaded(self, info: RuntimeInfo, baseline: Mapping[str, Mapping[str, float]]) -> None:
        """The runtime is loaded. ``baseline`` is the manifest's drift, by output and then metric."""
        labels = (info.backend, info.device, info.profile, info.precision, info.accumulation)
        self._of(self._families.info, *labels).set(1)
        for output, metrics in baseline.items():
            for metric, value in metrics.items():
                self._of(self._families.baseline, output, metric).set(value)

    def ready(self, is_ready: bool, load_seconds: float | None = None) -> None:
        self._ready.set(1 if is_ready else 0)
        if load_seconds is not None:
            self._load_seconds.set(load_seconds)

    # --- requests -----------------------------------------------------------------------------------------------------

    def request(self, seen: Observation) -> None:
        """One request is over, answered or not: what it waited counts either way, or waiting would look shorter than
        it is."""
        series = self._requests.get(seen.code)
        if series is None and self.exposed:  # see budget_ratio
            series = self._requests[seen.code] = self._of(self._families.requests, seen.code)
        if series is not None:
            series.inc()
        exemplar = {"trace_id": seen.trace} if seen.trace else None
        self._request_seconds.observe(seen.seconds, exemplar)
        if seen.timings is not None:
            self._queue_seconds.observe(seen.timings.queue, exemplar)

    def rejected(self, reason: str) -> None:
        """``reason`` is one of :data:`~service.telemetry.vocabulary.REJECTIONS`."""
        self._rejected[reason].inc()

    def executed(self, rows: int, seconds: float) -> None:
        self._executions.inc()
        self._rows.inc(rows)
        self._batch_rows.observe(rows)
        self._compute_seconds.observe(seconds)

    # --- drift --------------------------------------------------------------------------------------------------------

    def sampled(self, outcome: words.Outcome, samples: int) -> None:
        self._samples[outcome].inc(samples)

    def drift(self, output: str, sample: SampleDrift) -> None:
        """The drift of one sample (row) of one output."""
        series = self._outputs[output]
        series.relative_l2.observe(words.finite(sample.relative_l2))
        series.cosine.observe(words.finite(sample.cosine_distance))
        series.max_abs.observe(words.finite(sample.max_abs))
        series.nonfinite.inc(sample.nonfinite)
        if series.top1 is not None:
            series.top1[0].inc(sample.top1_matches)
            series.top1[1].inc(sample.top1_rows)

    def budget_ratio(self, output: str, metric: str, ratio: float) -> None:
        """Recent drift ÷ budget. Until the first call there is no series: 0 would say that the model is perfect."""
        if not self.exposed:  # looked up by its labels, it would be another generation's, or come back for good
            return
        self._of(self._families.budget_ratio, output, metric).set(ratio)


class Metrics:
    """All models' metrics on one registry: give each server (and each test) its own."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._registry = registry or CollectorRegistry()
        maker = _Maker(self._registry)
        self._modes, self._families = maker.modes, _Families(maker)
        self._models: dict[tuple[str, int], ModelMetrics] = {}
        refused = Counter(
            "bf16kit_refused_total",
            "Refused at the door, before a model was known.",
            ["reason"],
            registry=self._registry,
        )
        self._refused = {reason: refused.labels(reason) for reason in REFUSALS}
        traced = Counter(
            "bf16kit_traces_total", "Requests that were traced, by outcome.", ["outcome"], registry=self._registry
        )
        self._traced = {outcome: traced.labels(outcome) for outcome in words.TRACE_OUTCOMES}
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)

    def add(self, model: str, version: int) -> ModelMetrics:
        """New series of this model version, all of them present with value 0, in place of any it has already.

        The series replaced still count for whoever holds them, where no scraper sees them.
        """
        self._drop(model, version)
        series = self._models[model, version] = ModelMetrics(self._families, model, version)
        return series

    def remove(self, series: ModelMetrics) -> None:
        """Remove these series; nothing happens where others have taken their place."""
        if self._models.get((series.model, series.version)) is series:
            self._drop(series.model, series.version)

    def _drop(self, model: str, version: int) -> None:
        series = self._models.pop((model, version), None)
        if series is not None:
            series.exposed = False
            for family in self._families.all():
                family.remove_by_labels({"model": model, "version": str(version)})

    def traced(self, outcome: words.TraceOutcome, traces: int) -> None:
        """What became of requests that were traced."""
        self._traced[outcome].inc(traces)

    def refused(self, reason: str) -> None:
        """Something was refused at the door; a reason that is none of :data:`REFUSALS` counts as ``other``."""
        self._refused.get(reason, self._refused["other"]).inc()

    def samples(self, names: Iterable[str]) -> Iterator[Sample]:
        """The samples of these names, as they are now: a fraction of what :meth:`expose` costs."""
        for family in self._registry.restricted_registry(names).collect():
            yield from family.samples

    def snapshot(self, begins: str = "") -> list[Family]:
        """Everything as it is now, of the metrics whose names begin so: to be added to other processes'."""
        collected = _WithoutCreationTimes(self._registry).collect()
        return [
            _family(metric, self._modes.get(metric.name, "sum"))
            for metric in collected
            if metric.name.startswith(begins)
        ]

    def expose(self, accept: str = "") -> tuple[bytes, str]:
        """The metrics as a scraper wants them (its Accept header), and their content type.

        An Accept header that makes no sense gets what one gets who sends none.
        """
        return _encoded(_WithoutCreationTimes(self._registry), accept)


def expose(families: Iterable[Family], accept: str = "") -> tuple[bytes, str]:
    """The same of families that were added up."""
    return _encoded(_Added(list(families)), accept)


def _encoded(collector: Collector, accept: str) -> tuple[bytes, str]:
    encode, content_type = _encoder(accept)
    return encode(collector), content_type


def _family(metric: Metric, mode: Mode) -> Family:
    series = []
    for sample in metric.samples:
        told = sample.exemplar
        exemplar = None if told is None else Exemplar(dict(told.labels), told.value, _seconds(told.timestamp))
        series.append(Series(sample.name, dict(sample.labels), sample.value, exemplar))
    return Family(metric.name, metric.type, metric.documentation, mode, series)


def _seconds(timestamp: float | Timestamp | None) -> float | None:
    return None if timestamp is None else float(timestamp)


class _Added(Collector):
    """Families, as the library wants them."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.text, family.kind)
            for name, labels, value, told in family.series:
                exemplar = None if told is None else PrometheusExemplar(told.labels, told.value, told.timestamp)
                metric.add_sample(name, labels, value, exemplar=exemplar)
            yield metric


def _encoder(accept: str) -> tuple[Callable[[Collector], bytes], str]:
    """prometheus_client's choice. It repeats the version asked for in its answer and fails on one that is no number."""
    try:
        encode, content_type = choose_encoder(accept)
    except (ValueError, AttributeError, TypeError, IndexError):
        return choose_encoder("")
    known = re.fullmatch(
        r"[a-z/-]+(; (version=\d+(\.\d+){1,2}|charset=utf-8|escaping=[a-z-]+))*", content_type, re.ASCII
    )
    return (encode, content_type) if known else choose_encoder("")


class _WithoutCreationTimes(Collector):
    """The registry, less the ``…_created`` series that double its size and tell an operator nothing."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
