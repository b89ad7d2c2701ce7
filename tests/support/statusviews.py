"""What ``/status.json`` holds, for tests of the status page: a server with everything that the page can show."""

import json
from collections.abc import Sequence
from typing import Any

from loopback import LoopbackModel, LoopbackRegistry

from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import RuntimeInfo
from bf16kit.service.contract import GATE_FAILED, ActivePrecision, StatisticsSnapshot
from bf16kit.service.http.pages import StatusReader
from bf16kit.service.request import Observation, Timings
from bf16kit.service.telemetry.metrics import Metrics, samples

AT = 1_767_323_045.0  # 2026-01-02T03:04:05, the time of the view
EMBEDDING = "sentence_embedding"


def status(models: Sequence[LoopbackModel], metrics: Metrics, **changes: Any) -> dict[str, Any]:
    """Return what the server's ``/status.json`` would hold now, with these changes."""
    reader = StatusReader(LoopbackRegistry(models), lambda: samples(metrics.values()))
    reader.listening(8001, 8002)
    seen: dict[str, Any] = json.loads(json.dumps(reader.snapshot(), allow_nan=False))
    return {**seen, "at": "2026-01-02T03:04:05+00:00", "at_seconds": AT, "uptime_seconds": 93_784.0, **changes}


def busy(
    metrics: Metrics, name: str, version: int = 1, *, ratio: float = 0.36, output: str = EMBEDDING
) -> LoopbackModel:
    """Return a model with requests and drift; over its budget and broken if ``ratio`` exceeds 1."""
    over, labels = ratio > 1, (name, str(version))
    series = metrics.add(name, version)
    series.opened(45_196_288, [TensorSpec(output, "float32", ("batch", 384))])
    info = RuntimeInfo(
        "onnxruntime", "cpu", "cpu-bf16", "bf16", "bf16" if over else "fp32", kernel="avx512_bf16",
        note="a note" if over else "", choice="auto: 2.65 ms a run, cpu 3.88 ms",
    )  # fmt: skip
    model = LoopbackModel(name, version=version, info=info)
    model.statistics = StatisticsSnapshot(weight_bytes=45_196_288)
    series.loaded(info, {output: {"relative_l2": 0.0047, "cosine_distance": 1.1e-5, "nonfinite": 0.0}}, model.budget)
    for at in range(40):
        series.request(Observation(*labels, "", "OK", 0.004 + 0.0005 * at, Timings(queue=0.002), rows=3))
        series.executed(1, 3, Timings(compute_infer=0.005))
    series.request(Observation(*labels, "", "RESOURCE_EXHAUSTED", 0.001))
    series.rejected("queue_full")
    series.sampled("measured", 380)
    for metric, share in (("relative_l2", ratio), ("cosine_distance", ratio / 10), ("slice_error", ratio / 2)):
        series.budget_ratio(
            output, metric, share, 0.95 * share, float("inf") if metric == "slice_error" else 1.05 * share
        )
    series.recent(output, 212.4, 1.7 if over else 0.31)
    series.worst_slice(output, 1, 7)
    series.judged("over" if over else "within", "broken" if over else "none")
    series.last_sample(AT - 2)
    series.reference_up(not over)
    series.gate("failed" if over else "passed", AT - 1_500)
    if over:
        series.changed(output)
        series.out_of_range("input_ids", 3)
        series.fallback(True)
        series.transition("fp32")
        model.golden = f"{GATE_FAILED} 2026-01-02T02:39:05+00:00: golden samples are over the drift budget"
        model.active_precision = ActivePrecision("fp32", f"relative_l2 of output {output!r} is 1.31 times its budget")
    return model


def everything() -> dict[str, Any]:
    """Return a server with every kind of model: healthy, over budget, without requests, loading, unavailable."""
    metrics = Metrics()
    for reason in ("in_flight", "in_flight", "too_slow"):
        metrics.refused(reason)
    models = [
        busy(metrics, "minilm"),
        busy(metrics, "minilm", 2, ratio=1.31),
        LoopbackModel("quiet", max_batch_size=0),
        LoopbackModel("vision", state="loading"),
        LoopbackModel("vision", version=2, state="unavailable"),
    ]
    return status(models, metrics, workers=4)
