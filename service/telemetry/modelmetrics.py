"""One model version's series: the methods that the rest of the server calls to report events."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from bf16kit.drift.metrics import SampleDrift
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import RuntimeInfo
from service.request import Observation
from service.telemetry import vocabulary
from service.telemetry.outputseries import OutputSeries

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge, Histogram

    from service.telemetry.families import AnyFamily, Families

_Child = TypeVar("_Child", "Counter", "Gauge", "Histogram")


class Changes:
    """Whether the series of models have changed. Collecting them takes a millisecond a model, so idle ones are not.

    ``lock`` is held while series are removed, and while series are created after the load began: creating one looks at
    :attr:`ModelMetrics.exposed` first.
    """

    __slots__ = ("lock", "pending")

    def __init__(self) -> None:
        self.pending = True
        self.lock = threading.Lock()

    def take(self) -> bool:
        """Return whether there are changes; from now on only later ones count."""
        pending, self.pending = self.pending, False
        return pending


class ModelMetrics:
    """The series of one generation of a model version, looked up once so that requests do not pay for lookups.

    Each method notes the change last: one that is noted before it is made could be overlooked.
    """

    def __init__(self, families: Families, model: str, version: int, changes: Changes) -> None:
        self.model, self.version = model, version
        self._changes = changes
        self.exposed = True  # False once others have replaced them, or the model is unloaded
        self._families = families
        self._labels = (model, str(version))
        self._late: dict[tuple[AnyFamily, tuple[str, ...]], Any] = {}  # series by family and labels, see _late_child
        f = families
        self._requests = {code: self._child(f.requests, code) for code in vocabulary.CODES}
        self._rejected = {reason: self._child(f.rejected, reason) for reason in vocabulary.REJECTIONS}
        self._samples = {outcome: self._child(f.samples, outcome) for outcome in vocabulary.OUTCOMES}
        self._rows, self._executions = self._child(f.rows), self._child(f.executions)
        self._request_seconds, self._queue_seconds = self._child(f.request_seconds), self._child(f.queue_seconds)
        self._compute_seconds, self._batch_rows = self._child(f.compute_seconds), self._child(f.batch_rows)
        self._queue_depth, self._in_flight = self._child(f.queue_depth), self._child(f.in_flight)
        self._ready, self._load_seconds = self._child(f.ready), self._child(f.load_seconds)
        self._replacement_failed = self._child(f.replacement_failed)
        self._weight_bytes = self._child(f.weight_bytes)
        self._outputs: dict[str, OutputSeries] = {}
        self._answers = {precision: self._child(f.answers, precision) for precision in vocabulary.PRECISIONS}
        self._fallback_active = self._child(f.fallback_active)
        self._fallback_failures = self._child(f.fallback_failures)
        self._transitions = {to: self._child(f.fallback_transitions, to) for to in vocabulary.PRECISIONS}
        self._gate_runs = {outcome: self._child(f.gate_runs, outcome) for outcome in vocabulary.GATE_OUTCOMES}
        self._states = {"over": self._child(f.over_budget), "within": self._child(f.within_budget)}
        self._reference_nonfinite = self._child(f.reference_nonfinite)
        self._causes = {cause: self._child(f.cause, cause) for cause in vocabulary.CAUSES}

    def _child(self, family: _Child, *labels: str) -> _Child:
        return family.labels(*self._labels, *labels)

    def _late_child(self, family: _Child, *labels: str) -> _Child | None:
        """Return a series that appears with its first value. None once the model's series are removed.

        Only exposed series are looked up by labels: afterwards the labels may belong to another generation's series, or
        bring removed ones back for good.
        """
        key = family, labels
        if (series := self._late.get(key)) is None:
            with self._changes.lock:
                if self.exposed:
                    series = self._late[key] = self._child(family, *labels)
        return series

    def _set_late_gauge(self, family: Gauge, value: float, *labels: str) -> None:
        if (series := self._late_child(family, *labels)) is not None:
            series.set(value)

    # --- loading ------------------------------------------------------------------------------------------------------

    def opened(self, weight_bytes: int, outputs: Iterable[TensorSpec]) -> None:
        """Create the series of the outputs, which are known once the artifact is open.

        A model that is unloaded while it is opened gets none.
        """
        self._weight_bytes.set(weight_bytes)
        with self._changes.lock:
            if self.exposed:
                self._outputs = {spec.name: OutputSeries(self._families, self._labels, spec) for spec in outputs}
        self._changes.pending = True

    def loaded(
        self, info: RuntimeInfo, baseline: Mapping[str, Mapping[str, float]], budget: Mapping[str, float]
    ) -> None:
        """Set what is known once the runtime is loaded.

        ``baseline`` is the manifest's drift, by output and then metric. ``budget`` holds the bounds.
        """
        for metric, bound in budget.items():
            self._set_late_gauge(self._families.budget, bound, metric)
        labels = (info.backend, info.device, info.profile, info.precision, info.accumulation)
        self._set_late_gauge(self._families.info, 1, *labels)
        for output, metrics in baseline.items():
            for metric, value in metrics.items():
                self._set_late_gauge(self._families.baseline, value, output, metric)
        self._changes.pending = True

    def ready(self, is_ready: bool, load_seconds: float | None = None) -> None:
        self._ready.set(1 if is_ready else 0)
        if load_seconds is not None:
            self._load_seconds.set(load_seconds)
        self._changes.pending = True

    def replacement_failed(self, failed: bool) -> None:
        """Set whether the version serves what it did because its replacement could not be loaded."""
        self._replacement_failed.set(1 if failed else 0)
        self._changes.pending = True

    # --- requests -----------------------------------------------------------------------------------------------------

    def queued(self, change: int) -> None:
        """Count requests that begin (1) or end (−1) to wait for a batch."""
        self._queue_depth.inc(change)
        self._changes.pending = True

    def in_flight(self, change: int) -> None:
        """Count requests that have come (1) or are over (−1)."""
        self._in_flight.inc(change)
        self._changes.pending = True

    def request(self, observation: Observation) -> None:
        """Count a request that is over, and its time if it was answered.

        A rejected or invalid request is over at once, and one with a short deadline soon: their times would make a
        failing service look fast.

        The time in the queue counts for every request that was queued; otherwise waits would look shorter than they
        are.
        """
        series = self._requests.get(observation.code) or self._late_child(self._families.requests, observation.code)
        if series is not None:
            series.inc()
        exemplar = {"trace_id": observation.trace} if observation.trace else None
        if observation.code == "OK":
            self._request_seconds.observe(observation.seconds, exemplar)
        if observation.timings is not None:
            self._queue_seconds.observe(observation.timings.queue, exemplar)
        self._changes.pending = True

    def rejected(self, reason: str) -> None:
        """Count a rejected request. ``reason`` is one of :data:`~service.telemetry.vocabulary.REJECTIONS`."""
        self._rejected[reason].inc()
        self._changes.pending = True

    def executed(self, rows: int, seconds: float) -> None:
        self._executions.inc()
        self._rows.inc(rows)
        self._batch_rows.observe(rows)
        self._compute_seconds.observe(seconds)
        self._changes.pending = True

    # --- drift --------------------------------------------------------------------------------------------------------

    def sampled(self, outcome: vocabulary.Outcome, samples: int) -> None:
        self._samples[outcome].inc(samples)
        self._changes.pending = True

    def drift(self, output: str, sample: SampleDrift, weight: float = 1.0, *, scalar: bool = False) -> None:
        """Observe the drift of one sample (row) of one output, which stands for ``weight`` rows.

        A row of one number (``scalar``) has no angle, and no magnitude to relate its error to: that is its max_abs.
        Elements that are not finite are counted unweighted: the metric counts what was observed and estimates nothing.
        """
        self._outputs[output].observe(sample, weight, scalar=scalar)
        self._changes.pending = True

    def judged_rows(self, output: str, rows: Sequence[SampleDrift], weight: float) -> None:
        """Add one request's rows to the sums that are pooled over replicas; each stands for ``weight`` rows."""
        self._outputs[output].add_judged(rows, weight)
        self._changes.pending = True

    def budget_ratio(self, output: str, metric: str, ratio: float, low: float, high: float) -> None:
        """Set recent drift ÷ budget and its 95 % interval.

        No series exists before the first call, because a 0 would claim a perfect model.
        """
        f = self._families
        for family, value in ((f.budget_ratio, ratio), (f.budget_ratio_low, low), (f.budget_ratio_high, high)):
            self._set_late_gauge(family, value, output, metric)
        self._changes.pending = True

    def worst_slice(self, output: str, axis: int, index: int) -> None:
        """Set where the slice with the largest error is."""
        self._set_late_gauge(self._families.worst_slice_axis, axis, output)
        self._set_late_gauge(self._families.worst_slice_index, index, output)
        self._changes.pending = True

    def recent(self, output: str, effective_samples: float, change_score: float | None) -> None:
        """Set the effective sample size and the change detector's sum ÷ threshold (None: not calibrated yet)."""
        self._set_late_gauge(self._families.effective_samples, effective_samples, output)
        if change_score is not None:
            self._set_late_gauge(self._families.change_score, change_score, output)
        self._changes.pending = True

    def changed(self, output: str) -> None:
        """Count an alarm of the change detector."""
        if (series := self._late_child(self._families.changes, output)) is not None:
            series.inc()
        self._changes.pending = True

    def out_of_range(self, name: str, rows: int) -> None:
        """Count measured rows of an input outside its calibrated range.

        A call with 0 creates the series of an input with a range.
        """
        if (series := self._late_child(self._families.out_of_range, name)) is not None:
            series.inc(rows)
        self._changes.pending = True

    def reference_nonfinite(self, rows: int) -> None:
        """Count rows that are left out because an output of the reference is not finite."""
        self._reference_nonfinite.inc(rows)
        self._changes.pending = True

    def judged(self, state: str, cause: str) -> None:
        """Set whether drift is ``over`` or ``within`` the budget, or neither is established, and its cause.

        ``cause`` is one of :data:`~service.telemetry.vocabulary.CAUSES`, or "none".
        """
        for name, series in self._states.items():
            series.set(1 if name == state else 0)
        for name, series in self._causes.items():
            series.set(1 if name == cause else 0)
        self._changes.pending = True

    def last_sample(self, at: float) -> None:
        """Set when drift was last measured, in Unix seconds."""
        self._set_late_gauge(self._families.last_sample, at)
        self._changes.pending = True

    def reference_up(self, up: bool) -> None:
        """Set whether the fp32 reference answers. Never called if none is configured."""
        self._set_late_gauge(self._families.reference_up, 1 if up else 0)
        self._changes.pending = True

    # --- fallback and golden gate -------------------------------------------------------------------------------------

    def answered(self, precision: vocabulary.Precision) -> None:
        """Count a request answered in this precision."""
        self._answers[precision].inc()
        self._changes.pending = True

    def fallback(self, active: bool) -> None:
        """Set whether fp32 answers instead of bf16."""
        self._fallback_active.set(1 if active else 0)
        self._changes.pending = True

    def fallback_failed(self) -> None:
        """Count a failure to load fp32 for answering."""
        self._fallback_failures.inc()
        self._changes.pending = True

    def transition(self, to: vocabulary.Precision) -> None:
        """Count a change of the precision that answers."""
        self._transitions[to].inc()
        self._changes.pending = True

    def gate(self, outcome: vocabulary.GateOutcome, at: float) -> None:
        """Count a run of the golden gate at Unix time ``at``. An ``error``, which gives no result, is not passed."""
        self._gate_runs[outcome].inc()
        self._set_late_gauge(self._families.gate_passed, 1 if outcome == "passed" else 0)
        self._set_late_gauge(self._families.gate_at, at)
        self._changes.pending = True
