"""The metrics of several processes, combined into those of one server."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess

import pytest

from bf16kit.drift.metrics import SampleDrift
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import RuntimeInfo
from service.request import Observation, Timings
from service.telemetry.merged import Family, MergedMetrics, Series
from service.telemetry.metrics import Metrics, expose
from service.telemetry.modelmetrics import ModelMetrics

M = {"model": "m", "version": "1"}
INFO = RuntimeInfo("onnxruntime", "cpu", "cpu", "bf16-weights", "fp32")
WANTED = [("m", "1")]


def counter(value: float, **labels: str) -> Family:
    return Family("c", "counter", "A counter.", "sum", [Series("c_total", {**M, **labels}, value)])


def gauge(value: float, mode: str) -> Family:
    return Family(f"g_{mode}", "gauge", "A gauge.", mode, [Series(f"g_{mode}", M, value)])  # type: ignore[arg-type]


def value_of(whole: MergedMetrics, name: str = "c_total") -> float | None:
    return next((series.value for series in whole.samples([name])), None)


def whole() -> MergedMetrics:
    return MergedMetrics(lambda: WANTED)


def test_counters_are_summed_and_gauges_combined_by_their_mode() -> None:
    adding = whole()
    for process, value in (("a", 3.0), ("b", 5.0)):
        adding.update(process, [counter(value), *(gauge(value, mode) for mode in ("sum", "min", "max"))])
    assert [value_of(adding, name) for name in ("c_total", "g_sum", "g_min", "g_max")] == [8, 8, 3, 5]


def test_a_dead_processs_counts_stay_and_its_gauges_are_removed() -> None:
    adding = whole()
    adding.update("a", [counter(3), gauge(3, "sum")])
    adding.update("b", [counter(5), gauge(5, "sum")])
    adding.process_died("a")
    assert (value_of(adding), value_of(adding, "g_sum")) == (8, 5)
    adding.update("a", [counter(1)])  # the replacement process starts from 0
    assert value_of(adding) == 9
    adding.process_died("a")
    adding.process_died("b")
    assert value_of(adding) == 9, "with nobody left, too"


def test_an_incomplete_report_leaves_out_what_has_not_changed() -> None:
    adding = whole()
    adding.update("a", [counter(3), gauge(3, "sum"), gauge(5, "max")])
    adding.update("a", [gauge(7, "sum")], complete=False)
    assert [value_of(adding, name) for name in ("c_total", "g_sum", "g_max")] == [3, 7, 5]
    adding.update("a", [counter(4), gauge(7, "sum")])
    assert [value_of(adding, name) for name in ("c_total", "g_sum", "g_max")] == [4, 7, None]
    adding.update("a", [], complete=False)
    adding.process_died("a")
    assert value_of(adding) == 4


def test_no_counter_decreases_whatever_the_order_of_events() -> None:
    adding, told = whole(), 0.0
    happenings: list[tuple[str, float | None]] = [
        *(("a", 1.0), ("b", 4.0), ("a", 7.0), ("a", None), ("b", 4.5), ("a", 0.0), ("a", 2.0)),
        *(("b", 1.0), ("b", None), ("a", None), ("a", 3.0), ("b", 0.5)),
    ]
    for process, value in happenings:
        if value is None:
            adding.process_died(process)
        else:
            adding.update(process, [counter(value)])
        now = value_of(adding)
        assert now is not None
        assert now >= told
        told = now
    assert told == 7 + 2 + 3 + 4.5 + 1 + 0.5


def test_counts_from_before_a_reload_of_the_model_are_dropped() -> None:
    adding = whole()
    adding.update("a", [counter(3)])
    adding.update("a", [counter(1)])
    assert value_of(adding) == 4
    adding.forget("other", [1])
    adding.forget("m", [2])
    assert value_of(adding) == 4
    adding.forget("m", [1])
    assert value_of(adding) == 1


def test_series_of_a_model_that_no_process_has_or_wants_are_removed() -> None:
    adding = MergedMetrics(list)
    adding.update("a", [counter(3), Family("p", "counter", "No model's.", "sum", [Series("p_total", {}, 2.0)])])
    adding.update("b", [counter(2)])
    adding.process_died("b")
    assert value_of(adding) == 5, "a has it still"
    adding.update("a", [])
    assert value_of(adding) is None
    assert value_of(adding, "p_total") == 2


def measured(metrics: Metrics, seconds: float, trace: str = "") -> ModelMetrics:
    model = metrics.add("m", 1)
    model.opened(100, [TensorSpec("y", "float32", ("batch", 4), "logits")])
    model.loaded(INFO, {"y": {"relative_l2": 1e-3}}, {"relative_l2": 0.015})
    model.request(Observation("m", "1", "", "OK", seconds, Timings(queue=0.2), trace=trace))
    model.drift("y", SampleDrift(2e-3, 1e-6, 0.5, math.inf, 1, 2, nonfinite=0))
    model.ready(is_ready=seconds < 1)
    return model


def two() -> MergedMetrics:
    adding = whole()
    for process, seconds in (("a", 0.3), ("b", 3.0)):
        metrics = Metrics()
        measured(metrics, seconds, trace=f"trace-{process}")
        told = json.loads(json.dumps([family.as_json() for family in metrics.snapshot()]))
        adding.update(process, [Family.from_json(each) for each in told])
    return adding


def test_the_metrics_of_two_processes_are_exposed_as_one_servers() -> None:
    text = expose(two().families())[0].decode()
    for line in (
        'bf16kit_requests_total{code="OK",model="m",version="1"} 2.0',
        'bf16kit_request_duration_seconds_bucket{le="0.5",model="m",version="1"} 1.0',
        'bf16kit_request_duration_seconds_bucket{le="+Inf",model="m",version="1"} 2.0',
        'bf16kit_request_duration_seconds_count{model="m",version="1"} 2.0',
        'bf16kit_request_duration_seconds_sum{model="m",version="1"} 3.3',
        'bf16kit_model_ready{model="m",version="1"} 0.0',
        'bf16kit_drift_baseline{metric="relative_l2",model="m",output="y",version="1"} 0.001',
    ):
        assert line in text
    assert len(re.findall(r"^process_resident_memory_bytes ", text, re.MULTILINE)) == 1
    assert re.search(r"^python_info\{[^}]*\} 1\.0$", text, re.MULTILINE), "a version is no sum"
    assert "pid=" not in text
    assert "_created" not in text


def test_the_sum_over_one_process_equals_its_own_metrics() -> None:
    metrics = Metrics()
    measured(metrics, 0.3)
    adding = whole()
    adding.update("a", metrics.snapshot("bf16kit_"))
    alone = [line for line in metrics.expose()[0].decode().splitlines() if "bf16kit_" in line]
    assert expose(adding.families())[0].decode().splitlines() == alone


def test_exemplars_name_the_newest_trace_in_openmetrics() -> None:
    text = expose(two().families(), "application/openmetrics-text; version=1.0.0")[0].decode()
    assert 'trace_id="trace-b"' in text
    assert text.endswith("# EOF\n")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_metrics() -> None:
    checked = subprocess.run(["promtool", "check", "metrics"], input=expose(two().families())[0], capture_output=True)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
