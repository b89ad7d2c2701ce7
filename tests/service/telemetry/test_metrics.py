from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import prometheus_client
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bf16kit.drift.metrics import SampleDrift
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import RuntimeInfo
from service.drift import intervals
from service.request import REFUSALS, Observation, Timings
from service.telemetry.families import CODES, MOMENTS, POOLED
from service.telemetry.metrics import Metrics
from service.telemetry.modelmetrics import Histogram, ModelMetrics

#: Design §8: name → type and the labels in addition to model and version.
DESIGN = {
    "bf16kit_requests_total": ("counter", {"code"}),
    "bf16kit_rows_total": ("counter", set()),
    "bf16kit_executions_total": ("counter", set()),
    "bf16kit_rejected_total": ("counter", {"reason"}),
    "bf16kit_request_duration_seconds": ("histogram", {"le"}),
    "bf16kit_queue_duration_seconds": ("histogram", {"le"}),
    "bf16kit_compute_duration_seconds": ("histogram", {"le"}),
    "bf16kit_batch_rows": ("histogram", {"le"}),
    "bf16kit_queue_depth": ("gauge", set()),
    "bf16kit_requests_in_flight": ("gauge", set()),
    "bf16kit_model_ready": ("gauge", set()),
    "bf16kit_model_replacement_failed": ("gauge", set()),
    "bf16kit_model_load_seconds": ("gauge", set()),
    "bf16kit_model_weight_bytes": ("gauge", set()),
    "bf16kit_model_info": ("gauge", {"backend", "device", "profile", "precision", "accumulation"}),
    "bf16kit_drift_relative_l2": ("histogram", {"le", "output"}),
    "bf16kit_drift_cosine_distance": ("histogram", {"le", "output"}),
    "bf16kit_drift_max_abs": ("histogram", {"le", "output"}),
    "bf16kit_drift_top1_matches_total": ("counter", {"output"}),
    "bf16kit_drift_top1_rows_total": ("counter", {"output"}),
    "bf16kit_drift_nonfinite_total": ("counter", {"output"}),
    "bf16kit_drift_samples_total": ("counter", {"outcome"}),
    "bf16kit_drift_budget_ratio": ("gauge", {"output", "metric"}),
    "bf16kit_drift_baseline": ("gauge", {"output", "metric"}),
    "bf16kit_fallback_active": ("gauge", set()),
    "bf16kit_fallback_transitions_total": ("counter", {"to"}),
    "bf16kit_fallback_failures_total": ("counter", set()),
} | {  # live drift, for alerts: docs/drift.md
    "bf16kit_drift_effective_samples": ("gauge", {"output"}),
    "bf16kit_drift_worst_slice_axis": ("gauge", {"output"}),
    "bf16kit_drift_worst_slice_index": ("gauge", {"output"}),
    "bf16kit_drift_budget": ("gauge", {"metric"}),
    "bf16kit_drift_pooled_total": ("counter", {"output", "metric", "moment"}),
    "bf16kit_drift_budget_ratio_low": ("gauge", {"output", "metric"}),
    "bf16kit_drift_budget_ratio_high": ("gauge", {"output", "metric"}),
    "bf16kit_drift_over_budget": ("gauge", set()),
    "bf16kit_drift_within_budget": ("gauge", set()),
    "bf16kit_drift_cause": ("gauge", {"cause"}),
    "bf16kit_drift_change_score": ("gauge", {"output"}),
    "bf16kit_drift_changes_total": ("counter", {"output"}),
    "bf16kit_drift_out_of_range_total": ("counter", {"input"}),
    "bf16kit_drift_reference_nonfinite_total": ("counter", set()),
    "bf16kit_drift_last_sample_timestamp_seconds": ("gauge", set()),
    "bf16kit_drift_reference_up": ("gauge", set()),
    "bf16kit_golden_gate_passed": ("gauge", set()),
    "bf16kit_golden_gate_runs_total": ("counter", {"outcome"}),
    "bf16kit_golden_gate_timestamp_seconds": ("gauge", set()),
    "bf16kit_answers_total": ("counter", {"precision"}),
}
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
PIECES = (
    *(
        "text/plain",
        "application/openmetrics-text",
        "*/*",
        "version",
        "escaping",
        "allow-utf-8",
        "underscores",
        "q=0.5",
    ),
    *(";", ",", "=", " ", "\x0b", "1.0.0", "0.0.4", "2", "-1", "1e9", "x"),
)
FEW = Metrics()
SAMPLE = SampleDrift(2e-3, 1e-6, 0.01, 54.0, top1_matches=1, top1_rows=2, nonfinite=0)


def loaded(metrics: Metrics, name: str = "m", version: int = 1) -> ModelMetrics:
    model = metrics.add(name, version)
    model.opened(1024, [TensorSpec("y", "float32", ("batch", 4), "logits")])
    model.loaded(INFO, {"y": {"relative_l2": 1e-3}}, {"relative_l2": 0.015})
    return model


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


def test_the_metrics_are_those_of_the_design_with_their_types_and_labels() -> None:
    metrics = Metrics()
    tell_all(loaded(metrics))
    text = metrics.expose()[0].decode()
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    ours = {name: kind for name, kind in types.items() if name.startswith("bf16kit_")}
    of_the_server = ("bf16kit_refused_total", "bf16kit_traces_total", "bf16kit_worker_restarts_total")
    assert ours == dict.fromkeys(of_the_server, "counter") | {name: kind for name, (kind, _) in DESIGN.items()}
    labels: dict[str, set[str]] = {name: set() for name in DESIGN}
    for name, pairs in re.findall(r"^(bf16kit_[a-z0-9_]+)\{(.*)\} \S+$", text, re.MULTILINE):
        if name in of_the_server:
            assert re.match("reason=|outcome=", pairs)
            continue
        base = name if name in DESIGN else re.sub(r"_(bucket|sum|count)$", "", name)
        labels[base] |= set(re.findall(r'(\w+)="', pairs))
    assert labels == {name: extra | {"model", "version"} for name, (_, extra) in DESIGN.items()}


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
    old.executed(3, 0.1)
    new = loaded(metrics)
    new.executed(1, 0.1)
    before = ours(metrics)
    old.executed(5, 0.1)
    old.queued(1)
    tell_all(old)
    metrics.remove(old)
    assert ours(metrics) == before
    assert before['bf16kit_rows_total{model="m",version="1"}'] == 1
    metrics.remove(new)
    assert not [key for key in ours(metrics) if "model=" in key]


def test_a_model_that_is_unloaded_while_it_is_opened_leaves_no_series() -> None:
    metrics = Metrics()
    before = ours(metrics)
    model = metrics.add("m", 1)
    metrics.remove(model)
    model.opened(10, [TensorSpec("y", "float32", ("batch", 2), "logits")])
    model.loaded(INFO, {"y": {"relative_l2": 1e-3}}, {"relative_l2": 1e-2})
    tell_all(model)
    assert ours(metrics) == before


def test_requests_are_counted_by_code_and_only_answered_ones_are_timed() -> None:
    """One that was not answered must not look like a fast one. Queue time counts for every request that was queued."""
    metrics = Metrics()
    model = loaded(metrics)
    for code in (*CODES, "UNKNOWN"):
        model.request(request(code))
    model.request(request("OK", Timings(queue=0.2)))
    model.request(request("INTERNAL", Timings(queue=0.3)))
    samples, of = exposed(metrics), 'model="m",version="1"'
    for code in (*CODES, "UNKNOWN"):
        assert samples[f'bf16kit_requests_total{{code="{code}",{of}}}'] == (2 if code in ("OK", "INTERNAL") else 1)
    assert samples[f"bf16kit_request_duration_seconds_count{{{of}}}"] == 2
    assert samples[f'bf16kit_request_duration_seconds_bucket{{le="0.25",{of}}}'] == 0
    assert samples[f'bf16kit_request_duration_seconds_bucket{{le="0.5",{of}}}'] == 2
    assert samples[f"bf16kit_queue_duration_seconds_count{{{of}}}"] == 2
    assert samples[f"bf16kit_queue_duration_seconds_sum{{{of}}}"] == pytest.approx(0.5)


def moments(metrics: Metrics, metric: str) -> dict[str, float]:
    labels = f'metric="{metric}",model="m",moment="{{}}",output="y",version="1"'
    samples = exposed(metrics)
    return {each: samples[f"bf16kit_drift_pooled_total{{{labels.format(each)}}}"] for each in MOMENTS}


@pytest.mark.parametrize("metric", POOLED)
def test_the_sums_of_requests_give_their_mean_and_its_error(metric: str) -> None:
    """The error is that of requests, whose rows are alike; it is larger than that of as many rows."""
    metrics = Metrics()
    model = loaded(metrics)
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
    found = moments(metrics, metric)
    mean = found["drift"] / found["weight"]
    squared = found["drift_squared"] - 2 * mean * found["weight_drift"] + mean**2 * found["weight_squared"]
    expected = intervals.mean(values, weights, clusters, positive=False)
    size = intervals.effective_size(weights, clusters)
    assert found["weight"] ** 2 / found["weight_squared"] == pytest.approx(size)
    error = math.sqrt(squared * size / (size - 1)) / found["weight"]
    assert mean == pytest.approx(expected.estimate)
    assert error * intervals.student(size - 1) == pytest.approx(expected.high - expected.estimate)


def test_a_destroyed_row_leaves_sums_that_later_rows_still_change() -> None:
    metrics = Metrics()
    model = loaded(metrics)
    model.judged_rows("y", [replace(SAMPLE, relative_l2=math.inf), replace(SAMPLE, relative_l2=math.nan)], 100.0)
    before = moments(metrics, "relative_l2")
    model.judged_rows("y", [SAMPLE], 1.0)
    after = moments(metrics, "relative_l2")
    assert after["drift_squared"] - before["drift_squared"] == pytest.approx(SAMPLE.relative_l2**2, rel=0.5)
    assert math.isfinite(before["drift"])


def test_an_infinite_drift_is_counted_and_leaves_the_sum_finite() -> None:
    metrics = Metrics()
    model = loaded(metrics)
    model.drift("y", SampleDrift(math.inf, 1.0, math.inf, -math.inf, 0, 1, nonfinite=3))
    samples = exposed(metrics)
    assert math.isfinite(samples['bf16kit_drift_relative_l2_sum{model="m",output="y",version="1"}'])
    assert samples['bf16kit_drift_relative_l2_bucket{le="1.0",model="m",output="y",version="1"}'] == 0
    assert samples['bf16kit_drift_relative_l2_count{model="m",output="y",version="1"}'] == 1
    assert samples['bf16kit_drift_nonfinite_total{model="m",output="y",version="1"}'] == 3


def test_an_output_that_is_not_logits_has_no_top1_series() -> None:
    metrics = Metrics()
    model = metrics.add("m", 1)
    model.opened(0, [TensorSpec("y", "float32", ("batch", 4), "embedding")])
    model.drift("y", SAMPLE)
    assert not [key for key in exposed(metrics) if "top1" in key]


def test_a_sample_counts_for_the_rows_it_represents_and_nonfinite_values_count_once() -> None:
    metrics = Metrics()
    model = loaded(metrics)
    model.drift("y", SAMPLE, 100.0)
    model.drift("y", SampleDrift(0.02, 1e-6, 0.01, 54.0, top1_matches=2, top1_rows=2, nonfinite=3), 1.0)
    samples = exposed(metrics)
    assert samples['bf16kit_drift_relative_l2_bucket{le="0.002",model="m",output="y",version="1"}'] == 100
    assert samples['bf16kit_drift_relative_l2_count{model="m",output="y",version="1"}'] == 101
    assert samples['bf16kit_drift_relative_l2_sum{model="m",output="y",version="1"}'] == pytest.approx(0.22)
    assert samples['bf16kit_drift_top1_matches_total{model="m",output="y",version="1"}'] == 102
    assert samples['bf16kit_drift_top1_rows_total{model="m",output="y",version="1"}'] == 202
    assert samples['bf16kit_drift_nonfinite_total{model="m",output="y",version="1"}'] == 3


def test_only_the_current_cause_is_set() -> None:
    metrics = Metrics()
    model = loaded(metrics)
    for state, cause in (("over", "broken"), ("over", "rounding"), ("within", "none"), ("unknown", "none")):
        model.judged(state, cause)
        samples = exposed(metrics)
        told = {name for name in ("rounding", "broken", "out_of_range")
                if samples[f'bf16kit_drift_cause{{cause="{name}",model="m",version="1"}}']}  # fmt: skip
        assert told == {cause} - {"none"}
        for name in ("over", "within"):
            assert samples[f'bf16kit_drift_{name}_budget{{model="m",version="1"}}'] == (state == name)


def test_a_golden_gate_with_an_error_is_not_passed() -> None:
    metrics = Metrics()
    model = loaded(metrics)
    for outcome, passed in (("passed", 1), ("error", 0), ("passed", 1), ("failed", 0)):
        model.gate(outcome, 5.0)  # type: ignore[arg-type]  # of these words
        assert exposed(metrics)['bf16kit_golden_gate_passed{model="m",version="1"}'] == passed
    assert exposed(metrics)['bf16kit_golden_gate_runs_total{model="m",outcome="error",version="1"}'] == 1


def test_responses_are_counted_by_precision_and_so_are_fallbacks() -> None:
    metrics = Metrics()
    model = loaded(metrics)
    model.answered("bf16")
    model.fallback(True)
    model.transition("fp32")
    samples = exposed(metrics)
    assert samples['bf16kit_answers_total{model="m",precision="bf16",version="1"}'] == 1
    assert samples['bf16kit_answers_total{model="m",precision="fp32",version="1"}'] == 0
    assert samples['bf16kit_fallback_active{model="m",version="1"}'] == 1
    assert samples['bf16kit_fallback_transitions_total{model="m",to="fp32",version="1"}'] == 1


def test_rejections_at_the_door_are_counted_by_reason_with_all_reasons_at_the_start() -> None:
    metrics = Metrics()
    assert {key for key in exposed(metrics) if "refused" in key} == {
        f'bf16kit_refused_total{{reason="{reason}"}}' for reason in REFUSALS
    }
    metrics.refused("streams")
    metrics.refused("a model's name from outside")
    refused = {key: value for key, value in exposed(metrics).items() if "refused" in key and value}
    assert refused == {
        'bf16kit_refused_total{reason="streams"}': 1,
        'bf16kit_refused_total{reason="other"}': 1,
    }


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.request(request("OK")),
        lambda model: model.executed(1, 0.1),
        lambda model: model.answered("bf16"),
        lambda model: model.queued(1),
        lambda model: model.ready(True),
        lambda model: model.drift("y", SAMPLE),
    ],
    ids=["request", "executed", "answered", "queued", "ready", "drift"],
)
def test_a_report_has_models_series_after_every_change_and_only_the_processs_own_without_one(
    change: Callable[[ModelMetrics], None],
) -> None:
    """Collecting and merging the series of idle models takes time."""
    metrics = Metrics()
    model = loaded(metrics)
    assert metrics.report()[1]
    families, complete = metrics.report()
    assert not complete
    assert {family.name.partition("_")[0] for family in families} == {"process", "python"}
    change(model)
    families, complete = metrics.report()
    assert complete
    assert {family.name for family in families} == {family.name for family in metrics.snapshot()}


def test_a_report_is_complete_after_a_model_came_or_went_and_after_a_rejection_before_any_model() -> None:
    metrics = Metrics()
    model = metrics.add("m", 1)
    for change in (
        lambda: metrics.add("m", 2),
        lambda: metrics.remove(model),
        lambda: metrics.refused("draining"),
        lambda: metrics.traced("exported", 1),
    ):
        metrics.report()
        assert not metrics.report()[1]
        change()
        assert metrics.report()[1]


def test_the_process_exposes_cpu_memory_open_files_and_garbage_collections() -> None:
    samples = exposed(Metrics())
    for name in ("process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds"):
        assert samples[name] > 0
    assert 'python_gc_collections_total{generation="2"}' in samples
    assert [key for key in samples if key.startswith("python_info{")]


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text;version=x",
        "text/plain;version=x",
        "text/plain;version=1.0.0;escaping=\u00e9",
        "application/openmetrics-text;version=" + "9" * 5000,
        "application/openmetrics-text;version=1.0.0\u00b2",
    ],
)
def test_an_invalid_accept_header_gets_a_valid_format(accept: str) -> None:
    body, content_type = Metrics().expose(accept)
    assert b"# TYPE bf16kit_requests_total counter" in body or b"# TYPE bf16kit_requests counter" in body
    assert content_type.isascii()


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        st.text(st.characters(max_codepoint=255), max_size=80),
        st.lists(
            st.sampled_from(
                PIECES
            ),
            max_size=12,
        ).map("".join),
    )
)  # fmt: skip
def test_any_accept_header_gets_metrics(accept: str) -> None:
    body, content_type = FEW.expose(accept)
    assert b"bf16kit_requests" in body
    assert re.fullmatch(r"[ -~]+", content_type)


def test_a_scraper_that_accepts_openmetrics_gets_it() -> None:
    body, content_type = Metrics().expose("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


BOUNDS = (0.5, 1.0, 2.0)


@given(st.lists(st.tuples(st.floats(0, 4) | st.sampled_from(BOUNDS), st.floats(0.01, 1e4)), min_size=1, max_size=30))
def test_counts_of_weighted_rows_are_integers_never_fall_and_are_within_half_a_row(
    seen: list[tuple[float, float]],
) -> None:
    histogram = Histogram(BOUNDS)
    before = [0.0] * (len(BOUNDS) + 1)
    for at, (value, weight) in enumerate(seen):
        histogram.observe(value, weight)
        now = histogram.copy().counts
        assert all(count == int(count) and count >= was for count, was in zip(now, before, strict=True))
        for count, bound in zip(now, (*BOUNDS, math.inf), strict=True):
            assert abs(count - math.fsum(w for v, w in seen[: at + 1] if v <= bound)) < 0.5 + 1e-6
        before = now
    assert histogram.copy().total == pytest.approx(math.fsum(v * w for v, w in seen))


@given(st.lists(st.floats(0, 4) | st.sampled_from(BOUNDS), max_size=20))
def test_with_weights_of_one_buckets_and_sum_are_the_librarys(values: list[float]) -> None:
    ours, theirs = Histogram(BOUNDS), prometheus_client.Histogram("h", "Text.", registry=None, buckets=BOUNDS)
    for value in values:
        ours.observe(value)
        theirs.observe(value)
    (family,) = theirs.collect()
    expected = [sample.value for sample in family.samples if sample.name in ("h_bucket", "h_sum")]
    assert [*ours.copy().counts, ours.copy().total] == expected


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_metrics() -> None:
    metrics = Metrics()
    model = loaded(metrics)
    model.drift("y", SAMPLE)
    tell_all(model)
    checked = subprocess.run(["promtool", "check", "metrics"], input=metrics.expose()[0], capture_output=True)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
