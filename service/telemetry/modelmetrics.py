"""One model version's metrics: the methods that the rest of the server calls to report events.

A model's values are plain numbers behind one lock, which become series only when they are exposed. An event takes the
lock once and changes a few numbers, those of Triton's statistics among them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence

from bf16kit.drift.metrics import SampleDrift
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import RuntimeInfo
from bf16kit.service.contract import StatisticsSnapshot
from bf16kit.service.request import Observation, Precision, Timings
from bf16kit.service.telemetry.families import CAUSES, MOMENTS, OF_MODEL, POOLED, GateOutcome, Outcome, finite
from bf16kit.service.telemetry.values import STATISTICS, Histogram, Key, ModelStatistics, Values

_QUEUE_DEPTH, _IN_FLIGHT = ("queue_depth",), ("requests_in_flight",)
LARGEST_POOLED = 10.0  # the most that a row counts in pooled sums: the square of more leaves no digits for later rows


class ModelMetrics:
    """The values of one generation of a model version."""

    def __init__(self, model: str, version: int) -> None:
        self.model, self.version = model, version
        self._lock = threading.Lock()  # guards all that follow
        self._values: dict[Key, float] = {}  # of counters and gauges; their keys lack the model and its version
        self._histograms: dict[Key, Histogram] = {}
        self._statistics = ModelStatistics()
        for name, metric in OF_MODEL.items():
            for labels in metric.start:
                if metric.kind == "histogram":
                    self._histograms[name, *labels] = Histogram(metric.buckets)
                else:
                    self._values[name, *labels] = 0.0
        self._request_seconds = self._histograms["request_duration_seconds",]
        self._queue_seconds = self._histograms["queue_duration_seconds",]
        self._compute_seconds = self._histograms["compute_duration_seconds",]
        self._batch_rows = self._histograms["batch_rows",]

    def values(self) -> Values:
        """Return all values of one moment."""
        with self._lock:
            found: Values = {**self._values, (STATISTICS,): self._snapshot()}
            found["rows_total",], found["executions_total",] = self._batch_rows.total, self._batch_rows.count
            found |= {key: histogram.copy() for key, histogram in self._histograms.items()}
        return {(key[0], self.model, str(self.version), *key[1:]): value for key, value in found.items()}

    @property
    def statistics(self) -> StatisticsSnapshot:
        """Triton's statistics at this moment."""
        with self._lock:
            return self._snapshot()

    # --- loading ------------------------------------------------------------------------------------------------------

    def opened(self, weight_bytes: int, outputs: Iterable[TensorSpec]) -> None:
        """Create the series of the outputs, which are known once the artifact is open."""
        self._set("model_weight_bytes", weight_bytes)
        with self._lock:
            self._statistics.weight_bytes = weight_bytes
            for output in outputs:
                for name in ("drift_relative_l2", "drift_cosine_distance", "drift_max_abs"):
                    self._histograms[name, output.name] = Histogram(OF_MODEL[name].buckets)
                counted = ["drift_nonfinite_total", "drift_effective_samples", "drift_changes_total"]
                if output.kind == "logits":
                    counted += ["drift_top1_matches_total", "drift_top1_rows_total"]
                for name in counted:
                    self._values[name, output.name] = 0.0
                for metric in POOLED:
                    for moment in MOMENTS:
                        self._values["drift_pooled_total", output.name, metric, moment] = 0.0

    def loaded(
        self, info: RuntimeInfo, baseline: Mapping[str, Mapping[str, float]], budget: Mapping[str, float]
    ) -> None:
        """Set what is known once the runtime is loaded.

        ``baseline`` is the manifest's drift, by output and then metric. ``budget`` holds the bounds.
        """
        for metric, bound in budget.items():
            self._set("drift_budget", bound, metric)
        self._set("model_info", 1, info.backend, info.device, info.profile, info.precision, info.accumulation)
        for output, metrics in baseline.items():
            for metric, value in metrics.items():
                self._set("drift_baseline", value, output, metric)

    def ready(self, is_ready: bool, load_seconds: float | None = None) -> None:
        self._set("model_ready", is_ready)
        if load_seconds is not None:
            self._set("model_load_seconds", load_seconds)

    def replacement_failed(self, failed: bool) -> None:
        """Set whether the version serves what it did because its replacement could not be loaded."""
        self._set("model_replacement_failed", failed)

    # --- requests -----------------------------------------------------------------------------------------------------

    def queued(self, change: int) -> None:
        """Count requests that begin (1) or end (−1) to wait for a batch."""
        with self._lock:
            self._values[_QUEUE_DEPTH] += change

    def began(self) -> None:
        """Count a request that begins to wait or run."""
        with self._lock:
            self._values[_IN_FLIGHT] += 1

    def ended(self, precision: Precision | None) -> None:
        """Count that it ended, and in which precision it was answered; None: it was not."""
        with self._lock:
            self._values[_IN_FLIGHT] -= 1
            if precision is not None:
                self._values["answers_total", precision] += 1

    def request(self, observation: Observation) -> None:
        """Count a request that is over, and its duration.

        Only answered requests are timed: a model that rejects them at once would otherwise look fast.
        """
        key, timings = ("requests_total", observation.code), observation.timings
        with self._lock:
            self._values[key] = self._values.get(key, 0.0) + 1
            if observation.succeeded:
                self._request_seconds.observe(observation.seconds, 1.0, observation.trace)
            else:
                self._statistics.failure(observation)
            if timings is not None:
                self._queue_seconds.observe(timings.queue, 1.0, observation.trace)

    def rejected(self, reason: str) -> None:
        """Count a rejected request. ``reason`` is one of :data:`~bf16kit.service.telemetry.families.REJECTIONS`."""
        self._add(1, "rejected_total", reason)

    def executed(self, requests: int, rows: int, timings: Timings, *, batching: bool = True) -> None:
        """Count a batch that has run.

        With ``batching`` off, Triton counts every request as one inference, whatever its number of rows.
        """
        with self._lock:
            self._batch_rows.observe(rows)
            self._compute_seconds.observe(timings.compute)
            self._statistics.execution(requests, rows if batching else requests, timings)

    # --- drift --------------------------------------------------------------------------------------------------------

    def sampled(self, outcome: Outcome, samples: int) -> None:
        self._add(samples, "drift_samples_total", outcome)

    def drift(self, output: str, sample: SampleDrift, weight: float = 1.0, *, scalar: bool = False) -> None:
        """Observe the drift of one sample (row) of one output, which stands for ``weight`` rows.

        A row of one number (``scalar``) has no angle, and no magnitude to relate its error to: that is its max_abs.
        Elements that are not finite are counted unweighted: the metric counts what was observed and estimates nothing.
        """
        with self._lock:
            if not scalar:
                self._histograms["drift_relative_l2", output].observe(finite(sample.relative_l2), weight)
                self._histograms["drift_cosine_distance", output].observe(finite(sample.cosine_distance), weight)
            self._histograms["drift_max_abs", output].observe(finite(sample.max_abs), weight)
            self._values["drift_nonfinite_total", output] += sample.nonfinite
            if ("drift_top1_rows_total", output) in self._values:
                self._values["drift_top1_matches_total", output] += sample.top1_matches * weight
                self._values["drift_top1_rows_total", output] += sample.top1_rows * weight

    def judged_rows(self, output: str, rows: Sequence[SampleDrift], weight: float) -> None:
        """Add one request's rows to the sums that are pooled over replicas; each stands for ``weight`` rows."""
        for metric in POOLED:
            summands = moments([getattr(row, metric) for row in rows], weight)
            for moment, value in zip(MOMENTS, summands, strict=True):
                self._add(value, "drift_pooled_total", output, metric, moment)

    def budget_ratio(self, output: str, metric: str, ratio: float, low: float, high: float) -> None:
        """Set recent drift ÷ budget and its 95 % interval.

        No series exists before the first call, because a 0 would claim a perfect model.
        """
        self._set("drift_budget_ratio", ratio, output, metric)
        self._set("drift_budget_ratio_low", low, output, metric)
        self._set("drift_budget_ratio_high", high, output, metric)

    def worst_slice(self, output: str, axis: int, index: int) -> None:
        """Set where the slice with the largest error is."""
        self._set("drift_worst_slice_axis", axis, output)
        self._set("drift_worst_slice_index", index, output)

    def recent(self, output: str, effective_samples: float, change_score: float | None) -> None:
        """Set the effective sample size and the change detector's sum ÷ threshold (None: not calibrated yet)."""
        self._set("drift_effective_samples", effective_samples, output)
        if change_score is not None:
            self._set("drift_change_score", change_score, output)

    def changed(self, output: str) -> None:
        """Count an alarm of the change detector."""
        self._add(1, "drift_changes_total", output)

    def out_of_range(self, name: str, rows: int) -> None:
        """Count measured rows of an input outside its calibrated range.

        A call with 0 creates the series of an input with a range.
        """
        self._add(rows, "drift_out_of_range_total", name)

    def reference_nonfinite(self, rows: int) -> None:
        """Count rows that are left out because an output of the reference is not finite."""
        self._add(rows, "drift_reference_nonfinite_total")

    def judged(self, state: str, cause: str) -> None:
        """Set whether drift is ``over`` or ``within`` the budget, or neither is established, and its cause.

        ``cause`` is one of :data:`~bf16kit.service.telemetry.families.CAUSES`, or "none".
        """
        self._set("drift_over_budget", state == "over")
        self._set("drift_within_budget", state == "within")
        for each in CAUSES:
            self._set("drift_cause", each == cause, each)

    def last_sample(self, at: float) -> None:
        """Set when drift was last measured, in Unix seconds."""
        self._set("drift_last_sample_timestamp_seconds", at)

    def reference_up(self, up: bool) -> None:
        """Set whether the fp32 reference answers. Never called if none is configured."""
        self._set("drift_reference_up", up)

    # --- fallback and golden gate -------------------------------------------------------------------------------------

    def fallback(self, active: bool) -> None:
        """Set whether fp32 answers instead of bf16."""
        self._set("fallback_active", active)

    def fallback_failed(self) -> None:
        """Count a failure to load fp32 for answering."""
        self._add(1, "fallback_failures_total")

    def transition(self, to: Precision) -> None:
        """Count a change of the precision that answers."""
        self._add(1, "fallback_transitions_total", to)

    def gate(self, outcome: GateOutcome, at: float) -> None:
        """Count a run of the golden gate at Unix time ``at``. An ``error``, which gives no result, is not passed."""
        self._add(1, "golden_gate_runs_total", outcome)
        self._set("golden_gate_passed", outcome == "passed")
        self._set("golden_gate_timestamp_seconds", at)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _snapshot(self) -> StatisticsSnapshot:
        return self._statistics.snapshot(self._request_seconds, self._queue_seconds, self._batch_rows.count)

    def _add(self, amount: float, *key: str) -> None:
        with self._lock:
            self._values[key] = self._values.get(key, 0.0) + amount

    def _set(self, name: str, value: float, *labels: str) -> None:
        with self._lock:
            self._values[name, *labels] = float(value)


def moments(drifts: Sequence[float], weight: float) -> tuple[float, ...]:
    """Return one request's summands of :data:`.families.MOMENTS`, which pool drift over replicas.

    Each of ``drifts`` is of a row that stands for ``weight`` rows. The request has the weight W = Σw of its rows and
    the drift X = Σw·x. Rows of one request are alike, so squares are of requests and not of rows, as in
    :func:`bf16kit.service.drift.intervals.mean`. The rules in deploy/prometheus/rules/fleet.yml compute the mean and
    its error. A NaN counts as :data:`LARGEST_POOLED`.
    """
    whole = weight * len(drifts)
    drift = weight * sum(each if each < LARGEST_POOLED else LARGEST_POOLED for each in drifts)
    return whole, drift, whole**2, whole * drift, drift**2
