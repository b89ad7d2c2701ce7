"""Every metric of the server: its name, type, labels and buckets, and how several processes' gauges combine.

No label's value comes from a client, so there are few. Independent of prometheus_client.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from bf16kit.service.request import PRECISIONS, REFUSALS

# 100 µs (a small MLP on the machine itself) to 10 s.
SECONDS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
# One row to 1,024.
ROWS = tuple(float(2**k) for k in range(11))
# From a hundredth of bf16's unit roundoff to the loss of the whole output. The default budget, 1.5e-2, is a bound.
RELATIVE_L2 = (3e-5, 1e-4, 3e-4, 1e-3, 2e-3, 3e-3, 5e-3, 7.5e-3, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.3, 1.0)
# About the square of the above; the default budget, 5e-4, is a bound. 2 = opposite directions.
COSINE = (1e-8, 1e-7, 1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 2e-4, 5e-4, 1e-3, 1e-2, 0.1, 1.0, 2.0)
# In the output's own unit, hence decades: from probabilities to unscaled regressions.
MAX_ABS = tuple(10.0**k for k in range(-6, 5))

CODES = (
    "OK", "CANCELLED", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND",
    "RESOURCE_EXHAUSTED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE",
)  # fmt: skip
REJECTIONS = ("queue_full", "queue_wait", "queue_bytes", "deadline", "cancelled", "draining")
Mode = Literal["sum", "min", "max"]
Outcome = Literal["measured", "dropped", "failed"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
GateOutcome = Literal["passed", "failed", "error"]
GATE_OUTCOMES: tuple[GateOutcome, ...] = get_args(GateOutcome)
CAUSES = ("rounding", "broken", "out_of_range")  # causes of a breach: see bf16kit.service.drift.detector
TraceOutcome = Literal["exported", "failed"]
TRACE_OUTCOMES: tuple[TraceOutcome, ...] = get_args(TraceOutcome)
POOLED = ("relative_l2", "cosine_distance")  # the metrics whose budget is on the mean, which replicas pool
MOMENTS = ("weight", "drift", "weight_squared", "weight_drift", "drift_squared")  # ΣW, ΣX, ΣW², ΣWX, ΣX²
LARGEST_DRIFT = 1e9  # one infinite value would make a sum infinite for good, and no rate could be computed from it


def finite(drift: float) -> float:
    """Return ``drift``, or the largest drift in its place if it is larger or not finite."""
    return drift if math.isfinite(drift) and drift < LARGEST_DRIFT else LARGEST_DRIFT


class Metric(NamedTuple):
    """One metric. ``start`` has the labels of the series that exist, with value 0, from the start."""

    kind: Literal["counter", "gauge", "histogram"]
    text: str
    labels: tuple[str, ...]
    start: Sequence[tuple[str, ...]]
    mode: Mode = "sum"
    buckets: tuple[float, ...] = ()


def _counter(text: str, *labels: str, values: Sequence[str] | None = None) -> Metric:
    return Metric("counter", text, labels, _start(labels, values))


def _gauge(text: str, *labels: str, mode: Mode, values: Sequence[str] | None = None) -> Metric:
    return Metric("gauge", text, labels, _start(labels, values), mode)


def _histogram(text: str, buckets: tuple[float, ...], *labels: str) -> Metric:
    return Metric("histogram", text, labels, _start(labels, None), buckets=buckets)


def _start(labels: Sequence[str], values: Sequence[str] | None) -> Sequence[tuple[str, ...]]:
    """Return a metric's ``start``: one series for each of ``values``; by default the only one without labels."""
    return [(value,) for value in values] if values is not None else [] if labels else [()]


_OF_MODEL: Mapping[str, Metric] = {
    "requests_total": _counter("Requests answered, by gRPC status code.", "code", values=CODES),
    "rows_total": _counter("Rows run: the sum of all batch sizes."),
    "executions_total": _counter("Batches run."),
    "rejected_total": _counter("Requests rejected or dropped before they ran.", "reason", values=REJECTIONS),
    "request_duration_seconds": _histogram("Time from arrival to response, of answered requests.", SECONDS),
    "queue_duration_seconds": _histogram("Time a request waited for its batch.", SECONDS),
    "compute_duration_seconds": _histogram("Time one batch took to run.", SECONDS),
    "batch_rows": _histogram("Rows in one batch.", ROWS),
    "queue_depth": _gauge("Requests waiting for a batch.", mode="sum"),
    "requests_in_flight": _gauge("Requests waiting or running.", mode="sum"),
    "model_ready": _gauge("1 while the model is ready, else 0.", mode="min"),
    "model_replacement_failed": _gauge(
        "1 while the newest change of a version that serves failed to load.", mode="max"
    ),
    "model_load_seconds": _gauge("Time from opening the artifact to ready.", mode="max"),
    "model_weight_bytes": _gauge("Bytes of stored weights that the model maps.", mode="max"),
    "model_info": _gauge(
        "Always 1; the labels say how the model runs.",
        "backend",
        "device",
        "profile",
        "precision",
        "accumulation",
        mode="max",
    ),
    "drift_relative_l2": _histogram("Relative L2 error of live rows.", RELATIVE_L2, "output"),
    "drift_cosine_distance": _histogram("Cosine distance of live rows.", COSINE, "output"),
    "drift_max_abs": _histogram("Largest difference of live rows.", MAX_ABS, "output"),
    "drift_pooled_total": _counter(
        "Sums over judged requests, to pool drift over replicas.", "output", "metric", "moment"
    ),
    "drift_top1_matches_total": _counter("Rows of logits with fp32's top class.", "output"),
    "drift_top1_rows_total": _counter("Rows of logits compared.", "output"),
    "drift_nonfinite_total": _counter("Elements not finite where fp32's are finite.", "output"),
    "drift_samples_total": _counter("Samples taken from live requests, by outcome.", "outcome", values=OUTCOMES),
    "drift_out_of_range_total": _counter("Measured rows with values outside the calibrated range.", "input"),
    "drift_reference_nonfinite_total": _counter("Measured rows not compared, because fp32's output is not finite."),
    "drift_last_sample_timestamp_seconds": _gauge("Unix time of the last drift measurement.", mode="max", values=()),
    "drift_reference_up": _gauge("1 while the fp32 reference is loaded and answers, else 0.", mode="max", values=()),
    "drift_budget": _gauge("The bounds of the drift budget.", "metric", mode="max"),
    "drift_baseline": _gauge("Drift measured at conversion.", "output", "metric", mode="max"),
    "drift_budget_ratio": _gauge(
        "Recent drift as a share of its budget; over 1 is a breach.", "output", "metric", mode="max"
    ),
    "drift_budget_ratio_low": _gauge("Lower end of the ratio's 95 % interval.", "output", "metric", mode="max"),
    "drift_budget_ratio_high": _gauge("Upper end of the ratio's 95 % interval.", "output", "metric", mode="max"),
    "drift_worst_slice_axis": _gauge("Axis of the slice of the output with the largest error.", "output", mode="max"),
    "drift_worst_slice_index": _gauge("First index of that slice along its axis.", "output", mode="max"),
    "drift_effective_samples": _gauge("Effective sample size of recent drift.", "output", mode="max"),
    "drift_over_budget": _gauge("1 while drift is over budget beyond chance.", mode="max"),
    "drift_within_budget": _gauge("1 while drift is within budget: every bound is met.", mode="max"),
    "drift_cause": _gauge("1 for the diagnosed cause, 0 for the others.", "cause", mode="max", values=CAUSES),
    "drift_change_score": _gauge(
        "The change detector's sum as a share of its threshold; 1 is an alarm.", "output", mode="max"
    ),
    "drift_changes_total": _counter("Alarms of the change detector.", "output"),
    "answers_total": _counter("Requests answered, by the precision that answered.", "precision", values=PRECISIONS),
    "fallback_active": _gauge("1 while fp32 answers instead of bf16.", mode="max"),
    "fallback_transitions_total": _counter("Switches between bf16 and fp32.", "to", values=PRECISIONS),
    "fallback_failures_total": _counter("Times that fp32 could not be loaded to answer."),
    "golden_gate_passed": _gauge("1 if the last golden gate passed, else 0.", mode="min", values=()),
    "golden_gate_runs_total": _counter("Runs of the golden gate.", "outcome", values=GATE_OUTCOMES),
    "golden_gate_timestamp_seconds": _gauge("Unix time of the last golden gate run.", mode="min", values=()),
}
#: The metrics of a model, by their names without the prefix ``bf16kit_``.
OF_MODEL: Mapping[str, Metric] = {
    name: metric._replace(labels=("model", "version", *metric.labels)) for name, metric in _OF_MODEL.items()
}
#: The metrics without a model.
OF_SERVER: Mapping[str, Metric] = {
    "refused_total": _counter("Requests rejected before they reached a model.", "reason", values=REFUSALS),
    "traces_total": _counter("Traced requests, by outcome of the export.", "outcome", values=TRACE_OUTCOMES),
    "worker_restarts_total": _counter("Workers that ended and were replaced."),
}
METRICS: Mapping[str, Metric] = {**OF_MODEL, **OF_SERVER}
