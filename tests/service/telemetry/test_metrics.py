import math
import shutil
import subprocess
import time
from dataclasses import replace
from typing import Any

import numpy as np
import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bf16kit.drift.metrics import SampleDrift
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import RuntimeInfo
from bf16kit.service.contract import Duration
from bf16kit.service.drift import intervals
from bf16kit.service.request import REFUSALS, Observation, Precision, Timings
from bf16kit.service.telemetry.families import CAUSES, CODES, LARGEST_DRIFT, MOMENTS, POOLED, GateOutcome
from bf16kit.service.telemetry.metrics import Metrics
from bf16kit.service.telemetry.modelmetrics import ModelMetrics
from bf16kit.service.telemetry.values import Histogram

LATE = (  # they have no series until their value is known
    "bf16kit_drift_budget_ratio",
    "bf16kit_drift_worst_slice_axis",
    "bf16kit_drift_worst_slice_index",
    "bf16kit_drift_change_score",
    "bf16kit_drift_out_of_range_total",
    "bf16kit_drift_last_sample_timestamp_seconds",
    "bf16kit_drift_reference_up",
    "bf16kit_golden_gate_passed",
    "bf16kit_golden_gate_timestamp_seconds",
)
INFO = RuntimeInfo("onnxruntime", "cpu", "cpu", "bf16-weights", "fp32")
RAN = Timings(compute_infer=0.1)
SAMPLE = SampleDrift(2e-3, 1e-6, 0.01, 54.0, top1_matches=1, top1_rows=2, nonfinite=0)


def loaded(metrics: Metrics, name: str = "m", version: int = 1) -> ModelMetrics:
    model = metrics.add(name, version)
    model.opened(1024, [TensorSpec("y", "float32", ("batch", 4), "logits")])
    model.loaded(INFO, {"y": {"relative_l2": 1e-3}}, {"relative_l2": 0.015})
    return model


@pytest.fixture
def model() -> ModelMetrics:
    return loaded(Metrics())


def shown(model: ModelMetrics) -> dict[tuple[str, ...], Any]:
    """Return the values of a model by the name of the metric and its further labels."""
    return {(key[0], *key[3:]): value for key, value in model.values().items()}


def tell_all(model: ModelMetrics) -> None:
    """Set every series that does not exist until its value is known."""
    model.budget_ratio("y", "relative_l2", 0.1, 0.05, 0.2)
    model.recent("y", 12.5, 0.25)
    model.worst_slice("y", 1, 3)
    model.changed("y")
    model.out_of_range("x", 3)
    model.judged("over", "broken")
    model.last_sample(1.7e9)
    model.reference_up(True)
    model.gate("failed", 1.7e9)


def request(code: str, timings: Timings | None = None) -> Observation:
    return Observation("m", "1", "", code, 0.3, timings)


def exposed(metrics: Metrics) -> dict[str, float]:
    """Return every sample, by name and sorted labels as written in the text."""
    lines = metrics.expose()[0].decode().splitlines()
    return {key: float(value) for line in lines if not line.startswith("#") for key, value in [line.rsplit(" ", 1)]}


def ours(metrics: Metrics) -> dict[str, float]:
    """Return the samples without those of the process, which change all the time."""
    return {key: value for key, value in exposed(metrics).items() if key.startswith("bf16kit_")}


def test_every_series_exists_with_value_0_before_the_first_request() -> None:
    metrics = Metrics()
    loaded(metrics)
    samples = ours(metrics)
    known = {"bf16kit_model_info", "bf16kit_model_weight_bytes", "bf16kit_drift_baseline", "bf16kit_drift_budget"}
    assert {key: value for key, value in samples.items() if value and key.split("{")[0] not in known} == {}
    assert samples['bf16kit_requests_total{code="OK",model="m",version="1"}'] == 0
    assert samples['bf16kit_drift_budget{metric="relative_l2",model="m",version="1"}'] == 0.015
    assert samples['bf16kit_rejected_total{model="m",reason="draining",version="1"}'] == 0
    assert [key for key in samples if key.startswith(LATE)] == []


def test_series_that_are_late_have_the_values_that_they_were_given(model: ModelMetrics) -> None:
    tell_all(model)
    seen = shown(model)
    assert [seen[f"drift_budget_ratio{end}", "y", "relative_l2"] for end in ("", "_low", "_high")] == [0.1, 0.05, 0.2]
    assert (seen["drift_effective_samples", "y"], seen["drift_change_score", "y"]) == (12.5, 0.25)
    assert (seen["drift_worst_slice_axis", "y"], seen["drift_worst_slice_index", "y"]) == (1, 3)
    assert (seen["drift_changes_total", "y"], seen["drift_out_of_range_total", "x"]) == (1, 3)
    assert seen["drift_last_sample_timestamp_seconds",] == seen["golden_gate_timestamp_seconds",] == 1.7e9
    assert seen["drift_reference_up",] == 1


def test_removing_a_model_removes_its_series_and_no_others() -> None:
    metrics = Metrics()
    loaded(metrics, "stays")
    before = ours(metrics)
    goes = loaded(metrics, "goes")
    goes.drift("y", SAMPLE)
    goes.request(request("OK"))
    metrics.remove(goes)
    assert ours(metrics) == before
    goes.drift("y", SAMPLE)  # a shadow that still reports after the removal
    tell_all(goes)
    goes.request(request("DATA_LOSS"))
    assert ours(metrics) == before


def test_replaced_series_are_not_shown_and_their_removal_keeps_the_new_ones() -> None:
    metrics = Metrics()
    old = loaded(metrics)
    old.executed(1, 3, RAN)
    new = loaded(metrics)
    new.executed(1, 1, RAN)
    before = ours(metrics)
    old.executed(1, 5, RAN)
    old.queued(1)
    tell_all(old)
    metrics.remove(old)
    assert ours(metrics) == before
    assert before['bf16kit_rows_total{model="m",version="1"}'] == 1
    metrics.remove(new)
    assert not [key for key in ours(metrics) if "model=" in key]


def test_requests_are_counted_by_code_and_only_answered_ones_are_timed(model: ModelMetrics) -> None:
    """One that was not answered must not look like a fast one. Queue time counts for every request that was queued."""
    for code in (*CODES, "UNKNOWN"):
        model.request(request(code))
    model.request(request("OK", Timings(queue=0.2)))
    model.request(request("INTERNAL", Timings(queue=0.3)))
    seen = shown(model)
    for code in (*CODES, "UNKNOWN"):
        assert seen["requests_total", code] == (2 if code in ("OK", "INTERNAL") else 1)
    assert seen["request_duration_seconds",].total == pytest.approx(0.6)
    assert (seen["request_duration_seconds",].count, seen["queue_duration_seconds",].count) == (2, 2)
    assert seen["queue_duration_seconds",].total == pytest.approx(0.5)


def moments(model: ModelMetrics, metric: str) -> dict[str, float]:
    return {each: shown(model)["drift_pooled_total", "y", metric, each] for each in MOMENTS}


@pytest.mark.parametrize("metric", POOLED)
def test_the_sums_of_requests_give_their_mean_and_its_error(model: ModelMetrics, metric: str) -> None:
    """The error is that of requests, whose rows are alike; it is larger than that of as many rows."""
    random = np.random.default_rng(3)
    values, weights, clusters = np.zeros(0), np.zeros(0), np.zeros(0, np.int64)
    for request in range(60):
        rows, weight = int(random.integers(1, 5)), float(random.choice((1.0, 40.0)))
        drift = random.exponential() * np.exp(0.01 * random.standard_normal(rows))
        model.judged_rows(
            "y", [replace(SAMPLE, relative_l2=each, cosine_distance=each) for each in drift.tolist()], weight
        )
        values, weights = np.append(values, drift), np.append(weights, [weight] * rows)
        clusters = np.append(clusters, [request] * rows)
    found = moments(model, metric)
    mean = found["drift"] / found["weight"]
    squared = found["drift_squared"] - 2 * mean * found["weight_drift"] + mean**2 * found["weight_squared"]
    expected = intervals.mean(values, weights, clusters, positive=False)
    size = intervals.effective_size(weights, clusters)
    assert found["weight"] ** 2 / found["weight_squared"] == pytest.approx(size)
    error = math.sqrt(squared * size / (size - 1)) / found["weight"]
    assert mean == pytest.approx(expected.estimate)
    assert error * intervals.student(size - 1) == pytest.approx(expected.high - expected.estimate)


def test_a_destroyed_row_leaves_sums_that_later_rows_still_change(model: ModelMetrics) -> None:
    model.judged_rows("y", [replace(SAMPLE, relative_l2=math.inf), replace(SAMPLE, relative_l2=math.nan)], 100.0)
    before = moments(model, "relative_l2")
    model.judged_rows("y", [SAMPLE], 1.0)
    after = moments(model, "relative_l2")
    assert after["drift_squared"] - before["drift_squared"] == pytest.approx(SAMPLE.relative_l2**2, rel=0.5)
    assert math.isfinite(before["drift"])


def test_an_infinite_drift_is_counted_and_leaves_the_sum_finite(model: ModelMetrics) -> None:
    model.drift("y", SampleDrift(math.inf, 1.0, math.inf, -math.inf, 0, 1, nonfinite=3))
    histogram = shown(model)["drift_relative_l2", "y"]
    assert (histogram.total, histogram.counts()[-2:]) == (LARGEST_DRIFT, [0, 1])


def test_a_sample_counts_for_the_rows_it_represents_and_nonfinite_values_count_once(model: ModelMetrics) -> None:
    model.drift("y", SAMPLE, 100.0)
    model.drift("y", replace(SAMPLE, relative_l2=0.02, top1_matches=2, nonfinite=3), 1.0)
    seen = shown(model)
    assert sorted(filter(None, seen["drift_relative_l2", "y"].weights)) == [1, 100]
    assert seen["drift_relative_l2", "y"].total == pytest.approx(0.22)
    assert (seen["drift_top1_matches_total", "y"], seen["drift_top1_rows_total", "y"]) == (102, 202)
    assert seen["drift_nonfinite_total", "y"] == 3


def test_an_output_that_is_not_logits_has_no_top1_series() -> None:
    model = Metrics().add("m", 1)
    model.opened(0, [TensorSpec("y", "float32", ("batch", 4), "embedding")])
    model.drift("y", SAMPLE)
    assert not [key for key in shown(model) if "top1" in key[0]]


@pytest.mark.parametrize(
    ("state", "cause"), [("over", "broken"), ("over", "rounding"), ("within", "none"), ("unknown", "none")]
)
def test_only_the_current_state_and_cause_are_set(model: ModelMetrics, state: str, cause: str) -> None:
    model.judged("over" if state != "over" else "within", "out_of_range")
    model.judged(state, cause)
    seen = shown(model)
    assert {each for each in CAUSES if seen["drift_cause", each]} == {cause} - {"none"}
    assert [seen["drift_over_budget",], seen["drift_within_budget",]] == [state == "over", state == "within"]


def test_a_golden_gate_with_an_error_is_not_passed(model: ModelMetrics) -> None:
    outcomes: tuple[GateOutcome, ...] = ("passed", "error", "passed", "failed")
    passed = []
    for outcome in outcomes:
        model.gate(outcome, 5.0)
        passed.append(shown(model)["golden_gate_passed",])
    assert passed == [1, 0, 1, 0]
    assert shown(model)["golden_gate_runs_total", "error"] == 1


def test_requests_in_flight_and_responses_by_precision_are_counted_and_so_are_fallbacks(model: ModelMetrics) -> None:
    precisions: tuple[Precision | None, ...] = ("bf16", "bf16", None)
    for precision in precisions:
        model.began()
        model.ended(precision)
    model.began()
    model.fallback(True)
    model.transition("fp32")
    seen = shown(model)
    assert seen["requests_in_flight",] == 1
    assert (seen["answers_total", "bf16"], seen["answers_total", "fp32"]) == (2, 0)
    assert (seen["fallback_active",], seen["fallback_transitions_total", "fp32"]) == (1, 1)


def test_rejections_at_the_door_are_counted_by_reason_with_all_reasons_at_the_start() -> None:
    metrics = Metrics()
    assert {key for key in exposed(metrics) if "refused" in key} == {
        f'bf16kit_refused_total{{reason="{reason}"}}' for reason in REFUSALS
    }
    metrics.refused("streams")
    metrics.refused("a model's name from outside")
    refused = {key for key, value in exposed(metrics).items() if "refused" in key and value == 1}
    assert refused == {'bf16kit_refused_total{reason="streams"}', 'bf16kit_refused_total{reason="other"}'}


@pytest.mark.parametrize(
    ("accept", "kind", "end"),
    [
        ("", "text/plain; version=0.0.4", b"\n"),
        ("text/html, */*", "text/plain; version=0.0.4", b"\n"),
        ("application/openmetrics-text;version=1.0.0;q=0.5,*/*", "application/openmetrics-text; version", b"# EOF\n"),
        ("application/openmetrics-text;version=x\u00b2", "application/openmetrics-text; version", b"# EOF\n"),
    ],
)
def test_a_scraper_that_accepts_openmetrics_gets_it_and_any_other_gets_prometheus_text(
    accept: str, kind: str, end: bytes
) -> None:
    body, content_type = Metrics().expose(accept)
    assert content_type.startswith(kind)
    assert b"# TYPE bf16kit_requests" in body
    assert body.endswith(end)


BOUNDS = (0.5, 1.0, 2.0)


@given(st.lists(st.tuples(st.floats(0, 4) | st.sampled_from(BOUNDS), st.floats(0.01, 1e4)), min_size=1, max_size=30))
def test_counts_of_weighted_rows_are_integers_never_fall_and_are_within_half_a_row(
    seen: list[tuple[float, float]],
) -> None:
    histogram = Histogram(BOUNDS)
    before = [0.0] * (len(BOUNDS) + 1)
    for at, (value, weight) in enumerate(seen):
        histogram.observe(value, weight)
        now = histogram.counts()
        assert all(count == int(count) and count >= was for count, was in zip(now, before, strict=True))
        for count, bound in zip(now, (*BOUNDS, math.inf), strict=True):
            assert abs(count - math.fsum(w for v, w in seen[: at + 1] if v <= bound)) < 0.5 + 1e-6
        before = now
    assert histogram.total == pytest.approx(math.fsum(v * w for v, w in seen))


@given(st.lists(st.floats(0, 4) | st.sampled_from(BOUNDS), max_size=20))
def test_with_weights_of_one_buckets_and_sum_are_the_librarys(values: list[float]) -> None:
    ours, theirs = Histogram(BOUNDS), prometheus_client.Histogram("h", "Text.", registry=None, buckets=BOUNDS)
    for value in values:
        ours.observe(value)
        theirs.observe(value)
    (family,) = theirs.collect()
    expected = [sample.value for sample in family.samples if sample.name in ("h_bucket", "h_sum")]
    assert [*ours.counts(), ours.total] == expected


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_metrics() -> None:
    metrics = Metrics()
    model = loaded(metrics)
    model.drift("y", SAMPLE)
    tell_all(model)
    checked = subprocess.run(["promtool", "check", "metrics"], input=metrics.expose()[0], capture_output=True)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


# --- Triton's statistics ----------------------------------------------------------------------------------------------


def test_a_batch_counts_once_as_an_execution_and_once_per_request_in_the_durations(model: ModelMetrics) -> None:
    model.executed(3, 6, Timings(0.0, 0.001, 0.01, 0.002))
    seen = model.statistics
    assert (seen.inference_count, seen.execution_count) == (6, 1)
    assert seen.compute_input == Duration(3, 3_000_000)
    assert seen.compute_infer == Duration(3, 30_000_000)
    assert seen.compute_output == Duration(3, 6_000_000)
    assert abs(seen.last_inference_ms - time.time() * 1e3) < 60_000


def test_sizes_of_large_batches_are_rounded_up_to_the_next_power_of_two(model: ModelMetrics) -> None:
    for rows in range(1, 1025):
        model.executed(1, rows, Timings(compute_infer=0.001))
    batches = {batch.batch_size: batch.compute_infer.count for batch in model.statistics.batches}
    assert batches == {**dict.fromkeys(range(1, 129), 1), 256: 128, 512: 256, 1024: 512}


def test_successes_and_failures_are_counted_with_their_time_and_only_successes_with_their_wait(
    model: ModelMetrics,
) -> None:
    model.request(Observation("m", "1", "", "OK", 0.5, Timings(queue=0.2)))
    model.request(Observation("m", "1", "", "OK", 0.5))
    model.request(Observation("m", "1", "", "INTERNAL", 0.1, Timings(queue=0.3)))
    model.request(Observation("m", "1", "", "UNAVAILABLE", 0.1))
    seen = model.statistics
    assert seen.success == Duration(2, 1_000_000_000)
    assert seen.queue == Duration(1, 200_000_000)
    assert seen.fail == Duration(2, 200_000_000)
