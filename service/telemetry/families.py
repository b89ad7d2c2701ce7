"""Every metric of the server: its name, its type, its labels, and how several processes' gauges combine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from service.telemetry import vocabulary
from service.telemetry.merged import Mode
from service.telemetry.weighted import WeightedHistogram

LABELS = ("model", "version")
AnyFamily = Counter | Gauge | Histogram | WeightedHistogram
# How to combine those gauges of prometheus_client's own collectors that are not summed. All others are: a server's
# memory, for example, is the sum over its processes.
_PROCESS_MODES: Mapping[str, Mode] = {
    "process_start_time_seconds": "min",
    "process_max_fds": "min",
    "python_info": "max",
}


class FamilyFactory:
    """Makes the metric families of one registry. All of them have the model's labels."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.modes: dict[str, Mode] = dict(_PROCESS_MODES)  # by name: how to combine several processes' gauges

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"bf16kit_{name}", text, (*LABELS, *labels), registry=self._registry)

    def gauge(self, name: str, text: str, *labels: str, mode: Mode) -> Gauge:
        self.modes[f"bf16kit_{name}"] = mode
        return Gauge(f"bf16kit_{name}", text, (*LABELS, *labels), registry=self._registry)

    def histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"bf16kit_{name}", text, (*LABELS, *labels), registry=self._registry, buckets=buckets)

    def weighted(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> WeightedHistogram:
        return WeightedHistogram(f"bf16kit_{name}", text, (*LABELS, *labels), registry=self._registry, buckets=buckets)


class Families:
    """The metrics of models, registered once per process. Each gauge states how several workers' values combine."""

    def __init__(self, factory: FamilyFactory) -> None:
        self._add_request_families(factory)
        self._add_model_families(factory)
        self._add_drift_families(factory)
        self._add_verdict_families(factory)
        self._add_action_families(factory)

    def _add_request_families(self, factory: FamilyFactory) -> None:
        counter, gauge, histogram = factory.counter, factory.gauge, factory.histogram
        self.requests = counter("requests_total", "Requests answered, by gRPC status code.", "code")
        self.rows = counter("rows_total", "Rows run: the sum of all batch sizes.")
        self.executions = counter("executions_total", "Batches run.")
        self.rejected = counter("rejected_total", "Requests rejected or dropped before they ran.", "reason")
        self.request_seconds = histogram(
            "request_duration_seconds", "Time from arrival to response, of answered requests.", vocabulary.SECONDS
        )
        self.queue_seconds = histogram(
            "queue_duration_seconds", "Time a request waited for its batch.", vocabulary.SECONDS
        )
        self.compute_seconds = histogram("compute_duration_seconds", "Time one batch took to run.", vocabulary.SECONDS)
        self.batch_rows = histogram("batch_rows", "Rows in one batch.", vocabulary.ROWS)
        self.queue_depth = gauge("queue_depth", "Requests waiting for a batch.", mode="sum")
        self.in_flight = gauge("requests_in_flight", "Requests waiting or running.", mode="sum")

    def _add_model_families(self, factory: FamilyFactory) -> None:
        gauge = factory.gauge
        self.ready = gauge("model_ready", "1 while the model is ready, else 0.", mode="min")
        self.replacement_failed = gauge(
            "model_replacement_failed", "1 while the newest change of a version that serves failed to load.", mode="max"
        )
        self.load_seconds = gauge("model_load_seconds", "Time from opening the artifact to ready.", mode="max")
        self.weight_bytes = gauge("model_weight_bytes", "Bytes of stored weights that the model maps.", mode="max")
        self.info = gauge(
            "model_info", "Always 1; the labels say how the model runs.",
            "backend", "device", "profile", "precision", "accumulation", mode="max",
        )  # fmt: skip

    def _add_drift_families(self, factory: FamilyFactory) -> None:
        counter, gauge, weighted = factory.counter, factory.gauge, factory.weighted
        self.relative_l2 = weighted(
            "drift_relative_l2", "Relative L2 error of live rows.", vocabulary.RELATIVE_L2, "output"
        )
        self.cosine = weighted("drift_cosine_distance", "Cosine distance of live rows.", vocabulary.COSINE, "output")
        self.max_abs = weighted("drift_max_abs", "Largest difference of live rows.", vocabulary.MAX_ABS, "output")
        self.pooled = counter(
            "drift_pooled_total", "Sums over judged requests, to pool drift over replicas.",
            "output", "metric", "moment",
        )  # fmt: skip
        self.top1_matches = counter("drift_top1_matches_total", "Rows of logits with fp32's top class.", "output")
        self.top1_rows = counter("drift_top1_rows_total", "Rows of logits compared.", "output")
        self.nonfinite = counter("drift_nonfinite_total", "Elements not finite where fp32's are finite.", "output")
        self.samples = counter("drift_samples_total", "Samples taken from live requests, by outcome.", "outcome")
        self.out_of_range = counter(
            "drift_out_of_range_total", "Measured rows with values outside the calibrated range.", "input"
        )
        self.reference_nonfinite = counter(
            "drift_reference_nonfinite_total", "Measured rows not compared, because fp32's output is not finite."
        )
        self.last_sample = gauge(
            "drift_last_sample_timestamp_seconds", "Unix time of the last drift measurement.", mode="max"
        )
        self.reference_up = gauge(
            "drift_reference_up", "1 while the fp32 reference is loaded and answers, else 0.", mode="max"
        )
        self.budget = gauge("drift_budget", "The bounds of the drift budget.", "metric", mode="max")
        self.baseline = gauge("drift_baseline", "Drift measured at conversion.", "output", "metric", mode="max")

    def _add_verdict_families(self, factory: FamilyFactory) -> None:
        counter, gauge = factory.counter, factory.gauge
        self.budget_ratio = gauge(
            "drift_budget_ratio", "Recent drift as a share of its budget; over 1 is a breach.",
            "output", "metric", mode="max",
        )  # fmt: skip
        self.budget_ratio_low = gauge(
            "drift_budget_ratio_low", "Lower end of the ratio's 95 % interval.", "output", "metric", mode="max"
        )
        self.budget_ratio_high = gauge(
            "drift_budget_ratio_high", "Upper end of the ratio's 95 % interval.", "output", "metric", mode="max"
        )
        self.worst_slice_axis = gauge(
            "drift_worst_slice_axis", "Axis of the slice of the output with the largest error.", "output", mode="max"
        )
        self.worst_slice_index = gauge(
            "drift_worst_slice_index", "First index of that slice along its axis.", "output", mode="max"
        )
        self.effective_samples = gauge(
            "drift_effective_samples", "Effective sample size of recent drift.", "output", mode="max"
        )
        self.over_budget = gauge("drift_over_budget", "1 while drift is over budget beyond chance.", mode="max")
        self.within_budget = gauge(
            "drift_within_budget", "1 while drift is within budget: every bound is met.", mode="max"
        )
        self.cause = gauge("drift_cause", "1 for the diagnosed cause, 0 for the others.", "cause", mode="max")
        self.change_score = gauge(
            "drift_change_score", "The change detector's sum as a share of its threshold; 1 is an alarm.",
            "output", mode="max",
        )  # fmt: skip
        self.changes = counter("drift_changes_total", "Alarms of the change detector.", "output")

    def _add_action_families(self, factory: FamilyFactory) -> None:
        counter, gauge = factory.counter, factory.gauge
        self.answers = counter("answers_total", "Requests answered, by the precision that answered.", "precision")
        self.fallback_active = gauge("fallback_active", "1 while fp32 answers instead of bf16.", mode="max")
        self.fallback_transitions = counter("fallback_transitions_total", "Switches between bf16 and fp32.", "to")
        self.fallback_failures = counter("fallback_failures_total", "Times that fp32 could not be loaded to answer.")
        self.gate_passed = gauge("golden_gate_passed", "1 if the last golden gate passed, else 0.", mode="min")
        self.gate_runs = counter("golden_gate_runs_total", "Runs of the golden gate.", "outcome")
        self.gate_at = gauge("golden_gate_timestamp_seconds", "Unix time of the last golden gate run.", mode="min")

    def all(self) -> Iterable[AnyFamily]:
        families: dict[str, AnyFamily] = vars(self)
        return families.values()
