"""Views of servers for tests of the status page: one with everything that the page can show, and one of any size."""

from __future__ import annotations

import math
from collections.abc import Sequence

from loopback import LoopbackModel, LoopbackRegistry

from service.http.views import ModelView, RuntimeView, ServerView, StatusReader
from service.telemetry.history import TICKS, Counts, EarlyRejections, History, RecentActivity, Trend
from service.telemetry.livedrift import LiveDrift
from service.telemetry.metrics import Metrics
from service.telemetry.quantiles import Durations


def look_at(*models: LoopbackModel) -> ServerView:
    """Return the view of a server with these models, which got no requests yet."""
    return StatusReader(LoopbackRegistry(models), History(lambda: Metrics().samples([]))).snapshot()


def running(**changes: object) -> RuntimeView:
    """Return a model that runs on a CPU."""
    fields: dict[str, object] = {
        "backend": "onnxruntime",
        "device": "cpu",
        "profile": "cpu-bf16",
        "choice": "auto: 2.65 ms a run, cpu 3.88 ms (medians of 31 on the golden samples)",
        "precision": "bf16",
        "accumulation": "fp32",
        "kernel": "avx512_bf16",
        "note": "",
        "golden": "golden samples within budget (sentence_embedding relative_l2 0.0054)",
        "weight_bytes": 45_196_288,
        "max_batch_size": 32,
        "max_queue_delay_seconds": 0.002,
        "instances": 1,
        "inputs": ("input_ids: INT64 [batch,seq]", "attention_mask: INT64 [batch,seq]"),
        "outputs": ("sentence_embedding: FP32 [batch,384]",),
        "budget": {"relative_l2": 0.015, "cosine_distance": 5e-4, "nonfinite": 0.0},
    }
    return RuntimeView(**(fields | changes))  # type: ignore[arg-type]


AT = 1_767_323_045.0  # 2026-01-02T03:04:05, the time of the view


def live(*, output: str = "sentence_embedding", ratio: float = 0.36, **changes: object) -> LiveDrift:
    """Return a model's live drift: healthy if ``ratio`` is at most 1, else over budget and broken."""
    over = ratio > 1
    fields: dict[str, object] = {
        "low": {output: {"relative_l2": 0.95 * ratio, "cosine_distance": 0.09 * ratio, "nonfinite": 0.0}},
        "high": {output: {"relative_l2": 1.05 * ratio, "cosine_distance": 0.11 * ratio, "nonfinite": 0.0}},
        "effective_samples": {output: 212.4},
        "change_score": {output: 1.7 if over else 0.31},
        "worst_slice": {output: (1, 7)},
        "changes": 1 if over else 0,
        "over": over,
        "within": not over,
        "cause": "broken" if over else "",
        "out_of_range": {"input_ids": 3} if over else {},
        "last_sample": AT - 2,
        "reference_up": True,
        "gate_passed": True,
        "gate_at": AT - 1_500,
        "fallback": over,
        "fallback_since": AT - 320 if over else None,
        "fallbacks": 1 if over else 0,
        "answers": {"bf16": 80_000, "fp32": 8_000 if over else 0},
    }
    return LiveDrift(**(fields | changes))  # type: ignore[arg-type]


def recent(
    *, output: str = "sentence_embedding", ratio: float = 0.36, phase: float = 0.0, **drift: object
) -> RecentActivity:
    """Return five minutes of a busy model. ``drift`` are further arguments of :func:`live`."""
    waves = [1 + 0.4 * math.sin(phase + at / 9) + 0.1 * math.sin(at * 1.7) for at in range(TICKS)]
    counts = Counts({"OK": 12_900, "RESOURCE_EXHAUSTED": 31}, {"queue_full": 31}, {"measured": 380}, 40_100, 9_500)
    total = Counts({"OK": 88_000, "RESOURCE_EXHAUSTED": 31}, {"queue_full": 31}, {"measured": 2_600}, 280_000, 65_000)
    trend = Trend(
        requests_per_second=tuple(43 * wave for wave in waves),
        p99_seconds=tuple(0.02 * wave if at % 40 else None for at, wave in enumerate(waves)),
        waiting=tuple(3 * wave for wave in waves),
        drift=tuple(ratio * (0.9 + 0.1 * wave) for wave in waves),
    )
    return RecentActivity(
        seconds=300.0,
        counts=counts,
        total=total,
        request=Durations(12_931, 0.0102, 0.009, 0.0217, 0.0417),
        queue=Durations(12_931, 0.0031, 0.0021, 0.0056, 0.0156),
        compute=Durations(9_500, 0.0056, 0.0049, 0.0097, 0.0238),
        queue_depth=3,
        in_flight=5,
        ratios={output: {"relative_l2": ratio, "cosine_distance": ratio / 10, "nonfinite": 0.0}},
        baseline={output: {"relative_l2": 0.0047, "cosine_distance": 1.1e-5, "nonfinite": 0.0}},
        drift=live(output=output, ratio=ratio, **drift),
        trend=trend,
    )


def server(models: Sequence[ModelView], **changes: object) -> ServerView:
    """Return the view of a server that is ready if all its models are."""
    fields: dict[str, object] = {
        "at": "2026-01-02T03:04:05+00:00",
        "at_seconds": AT,
        "version": "1.2.3",
        "uptime_seconds": 93_784.0,
        "workers": 1,
        "grpc_port": 8001,
        "http_port": 8002,
        "ready": all(model.state == "ready" for model in models) and bool(models),
        "models": tuple(models),
        "door": EarlyRejections({"in_flight": 2}, {"in_flight": 12, "too_slow": 1}),
    }
    return ServerView(**(fields | changes))  # type: ignore[arg-type]


FALLEN = running(
    accumulation="bf16",
    note="a note",
    golden="FAILED 2026-01-02T02:39:05+00:00: golden samples are over the drift budget: sentence_embedding 0.19",
    active_precision="fp32",
    active_precision_reason="relative_l2 of output 'sentence_embedding' is 1.31 times its budget (95 %: 1.24 to 1.38,"
    " 212 effective samples), more than rounding explains: something is broken",
)


def everything() -> ServerView:
    """Return a view with every kind of model: healthy, over budget, without requests, loading, unavailable."""
    return server(
        [
            ModelView("minilm", 1, "ready", "", running(), recent()),
            ModelView("minilm", 2, "ready", "", FALLEN, recent(ratio=1.31, gate_passed=False, reference_up=False)),
            ModelView("quiet", 1, "ready", "", running(max_batch_size=0, kernel="", choice="")),
            ModelView("vision", 1, "loading", "loading"),
            ModelView("vision", 2, "unavailable", "golden samples are over the drift budget: output 'y'"),
        ],
        workers=4,
    )


def crowd(count: int) -> ServerView:
    """Return a view with ``count`` models, all of them busy."""
    return server([ModelView(f"model-{at:03}", 1, "ready", "", running(), recent(phase=at / 7)) for at in range(count)])
