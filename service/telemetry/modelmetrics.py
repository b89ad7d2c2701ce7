"""One model version's metrics: the methods that the rest of the server calls to report events.

A model's values are plain numbers behind one lock, which become series only when they are collected. Most events of a
request take the lock once and change a few numbers.
"""

from __future__ import annotations

import bisect
import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from bf16kit.drift.metrics import SampleDrift
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import RuntimeInfo
from service.request import Observation
from service.telemetry.families import (
    CAUSES,
    MOMENTS,
    OF_MODEL,
    POOLED,
    GateOutcome,
    Outcome,
    Precision,
    finite,
)
from service.telemetry.merged import Exemplar

LARGEST_POOLED = 10.0  # the most that a row counts in pooled sums: the square of more leaves no digits for later rows
Labels = tuple[str, ...]  # the values of a series' labels, without the model's


class Buckets(NamedTuple):
    """A copy of a histogram's buckets: cumulative counts, exemplars by the bucket's number, and the sum."""

    counts: list[float]
    exemplars: Mapping[int, Exemplar]
    total: float


class Histogram:
    """A histogram of weighted observations: each counts as the number of rows that it stands for.

    A sample taken with probability p stands for 1 ÷ p rows (Horvitz and Thompson, J. Am. Stat. Assoc. 47, 1952). The
    histogram thus estimates the distribution over all answered rows, however unevenly they were sampled.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds  # the last bucket, without a bound, comes after them
        self._weights = [0.0] * (len(bounds) + 1)
        self._exemplars: dict[int, Exemplar] = {}
        self._total = 0.0

    def observe(self, amount: float, weight: float = 1.0, trace: str = "") -> None:
        """Observe ``amount``, at least 0, with ``weight`` rows, which may be a fraction, in a trace with this id."""
        at = bisect.bisect_left(self._bounds, amount)
        self._weights[at] += weight
        self._total += amount * weight
        if trace:
            self._exemplars[at] = Exemplar({"trace_id": trace}, amount, time.time())

    def copy(self) -> Buckets:
        """Return the buckets. OpenMetrics requires whole counts.

        Each is rounded only here, so it is off by at most half a row and never falls.
        """
        below, counts = 0.0, []
        for weight in self._weights:
            below += weight
            counts.append(float(math.floor(below + 0.5)))
        return Buckets(counts, dict(self._exemplars), self._total)


class ModelMetrics:
    """The values of one generation of a model version."""

    def __init__(self, model: str, version: int) -> None:
        self.model, self.version = model, version
        self._lock = threading.Lock()  # guards all that follow
        self._changed = True
        self._values: dict[str, dict[Labels, float]] = {}  # of counters and gauges, by metric
        self._histograms: dict[str, dict[Labels, Histogram]] = {}
        for name, metric in OF_MODEL.items():
            labels = [(value,) if metric.labels else () for value in metric.values]
            if metric.kind == "histogram":
                self._histograms[name] = {each: Histogram(metric.buckets) for each in labels}
            else:
                self._values[name] = dict.fromkeys(labels, 0.0)
        self._requests, self._answers = self._values["requests_total"], self._values["answers_total"]
        self._request_seconds = self._histograms["request_duration_seconds"][()]
        self._queue_seconds = self._histograms["queue_duration_seconds"][()]
        self._compute_seconds = self._histograms["compute_duration_seconds"][()]
        self._batch_rows = self._histograms["batch_rows"][()]

    def copy(self) -> tuple[dict[str, dict[Labels, float]], dict[str, dict[Labels, Buckets]]]:
        """Return all values of one moment: those of counters and gauges, and the histograms'."""
        with self._lock:
            values = {name: dict(series) for name, series in self._values.items()}
            return values, {
                name: {labels: each.copy() for labels, each in series.items()}
                for name, series in self._histograms.items()
            }

    def take_changed(self) -> bool:
        """Return whether a value has been set since the last call."""
        with self._lock:
            changed, self._changed = self._changed, False
        return changed

    # --- loading ------------------------------------------------------------------------------------------------------

    def opened(self, weight_bytes: int, outputs: Iterable[TensorSpec]) -> None:
        """Create the series of the outputs, which are known once the artifact is open."""
        self._set("model_weight_bytes", weight_bytes)
        with self._lock:
            for output in outputs:
                of = (output.name,)
                for name in ("drift_relative_l2", "drift_cosine_distance", "drift_max_abs"):
                    self._histograms[name][of] = Histogram(OF_MODEL[name].buckets)
                counted = ["drift_nonfinite_total", "drift_effective_samples", "drift_changes_total"]
                if output.kind == "logits":
                    counted += ["drift_top1_matches_total", "drift_top1_rows_total"]
                for name in counted:
                    self._values[name][of] = 0.0
                for metric in POOLED:
                    for moment in MOMENTS:
                        self._values["drift_pooled_total"][output.name, metric, moment] = 0.0

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
        self._add("queue_depth", change)

    def in_flight(self, change: int) -> None:
        """Count requests that begin (1) or end (−1) to wait or run."""
        self._add("requests_in_flight", change)

    def request(self, observation: Observation) -> None:
        """Count a request that is over, and its duration.

        Only answered requests are timed: a model that rejects them at once would otherwise look fast.
        """
        code, timings = (observation.code,), observation.timings
        with self._lock:
            self._requests[code] = self._requests.get(code, 0.0) + 1
            if observation.succeeded:
                self._request_seconds.observe(observation.seconds, 1.0, observation.trace)
            if timings is not None:
                self._queue_seconds.observe(timings.queue, 1.0, observation.trace)
            self._changed = True

    def rejected(self, reason: str) -> None:
        """Count a rejected request. ``reason`` is one of :data:`~service.telemetry.families.REJECTIONS`."""
        self._add("rejected_total", 1, reason)

    def executed(self, rows: int, seconds: float) -> None:
        with self._lock:
            self._values["executions_total"][()] += 1
            self._values["rows_total"][()] += rows
            self._batch_rows.observe(rows)
            self._compute_seconds.observe(seconds)
            self._changed = True

    # --- drift --------------------------------------------------------------------------------------------------------

    def sampled(self, outcome: Outcome, samples: int) -> None:
        self._add("drift_samples_total", samples, outcome)

    def drift(self, output: str, sample: SampleDrift, weight: float = 1.0, *, scalar: bool = False) -> None:
        """Observe the drift of one sample (row) of one output, which stands for ``weight`` rows.

        A row of one number (``scalar``) has no angle, and no magnitude to relate its error to: that is its max_abs.
        Elements that are not finite are counted unweighted: the metric counts what was observed and estimates nothing.
        """
        of = (output,)
        with self._lock:
            if not scalar:
                self._histograms["drift_relative_l2"][of].observe(finite(sample.relative_l2), weight)
                self._histograms["drift_cosine_distance"][of].observe(finite(sample.cosine_distance), weight)
            self._histograms["drift_max_abs"][of].observe(finite(sample.max_abs), weight)
            self._values["drift_nonfinite_total"][of] += sample.nonfinite
            if of in self._values["drift_top1_rows_total"]:
                self._values["drift_top1_matches_total"][of] += sample.top1_matches * weight
                self._values["drift_top1_rows_total"][of] += sample.top1_rows * weight
            self._changed = True

    def judged_rows(self, output: str, rows: Sequence[SampleDrift], weight: float) -> None:
        """Add one request's rows to the sums that are pooled over replicas; each stands for ``weight`` rows."""
        for metric in POOLED:
            summands = moments([getattr(row, metric) for row in rows], weight)
            for moment, value in zip(MOMENTS, summands, strict=True):
                self._add("drift_pooled_total", value, output, metric, moment)

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
        self._add("drift_changes_total", 1, output)

    def out_of_range(self, name: str, rows: int) -> None:
        """Count measured rows of an input outside its calibrated range.

        A call with 0 creates the series of an input with a range.
        """
        self._add("drift_out_of_range_total", rows, name)

    def reference_nonfinite(self, rows: int) -> None:
        """Count rows that are left out because an output of the reference is not finite."""
        self._add("drift_reference_nonfinite_total", rows)

    def judged(self, state: str, cause: str) -> None:
        """Set whether drift is ``over`` or ``within`` the budget, or neither is established, and its cause.

        ``cause`` is one of :data:`~service.telemetry.families.CAUSES`, or "none".
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

    def answered(self, precision: Precision) -> None:
        """Count a request answered in this precision."""
        with self._lock:
            self._answers[precision,] += 1
            self._changed = True

    def fallback(self, active: bool) -> None:
        """Set whether fp32 answers instead of bf16."""
        self._set("fallback_active", active)

    def fallback_failed(self) -> None:
        """Count a failure to load fp32 for answering."""
        self._add("fallback_failures_total", 1)

    def transition(self, to: Precision) -> None:
        """Count a change of the precision that answers."""
        self._add("fallback_transitions_total", 1, to)

    def gate(self, outcome: GateOutcome, at: float) -> None:
        """Count a run of the golden gate at Unix time ``at``. An ``error``, which gives no result, is not passed."""
        self._add("golden_gate_runs_total", 1, outcome)
        self._set("golden_gate_passed", outcome == "passed")
        self._set("golden_gate_timestamp_seconds", at)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _add(self, name: str, amount: float, *labels: str) -> None:
        with self._lock:
            series = self._values[name]
            series[labels] = series.get(labels, 0.0) + amount
            self._changed = True

    def _set(self, name: str, value: float, *labels: str) -> None:
        with self._lock:
            self._values[name][labels] = float(value)
            self._changed = True


def moments(drifts: Sequence[float], weight: float) -> tuple[float, ...]:
    """Return one request's summands of :data:`~service.telemetry.families.MOMENTS`, which pool drift over replicas.

    Each of ``drifts`` is of a row that stands for ``weight`` rows. The request has the weight W = Σw of its rows and
    the drift X = Σw·x. Rows of one request are alike, so squares are of requests and not of rows, as in
    :func:`service.drift.intervals.mean`. The rules in deploy/prometheus/rules/fleet.yml compute the mean and its error.
    A NaN counts as :data:`LARGEST_POOLED`.
    """
    whole = weight * len(drifts)
    drift = weight * sum(each if each < LARGEST_POOLED else LARGEST_POOLED for each in drifts)
    return whole, drift, whole**2, whole * drift, drift**2
