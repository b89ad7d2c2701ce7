"""The sizing table of docs/scaling.md, computed from published results.

Nothing here was measured at these numbers of replicas: what one does is multiplied. What that leaves out is said on the
page, and where the product meets a limit that is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.core import models
from bench.core.publishing import Published
from bench.serving import wire
from bf16kit.protocol import inference_pb2 as pb
from bf16kit.service.drift.contract import ShadowPolicy

REPLICAS = (1, 10, 100, 1000)
_SCRAPE_SECONDS = 15  # deploy/prometheus/prometheus.yml
_HEADERS = 100  # bytes of HTTP/2 frames and of headers that repeat, beside each message: a round upper bound
# `curl :8002/metrics` of bf16-serve with MiniLM and nothing else, once ready, on 2026-11-22: its samples, its bytes.
_SERIES, _SCRAPE = 265, 28_029
_HIDDEN = 384  # of MiniLM, whose answer is a float32 of it for each token
_REPORTS_PER_SECOND = 100  # that the front of deploy/ray asks for, at most


@dataclass(frozen=True, slots=True)
class One:
    """What one replica of one core does and takes, and where that was measured."""

    mlp: float  # requests per second
    short: float  # MiniLM's of 16 tokens
    long: float  # of 128 tokens
    memory: float  # MB: a process with MiniLM, its weights its own, without a reference
    message: int  # bytes of a request for MiniLM of 16 tokens, and of its answer
    series: int
    scrape: int  # bytes
    samples: float  # of drift, per second at most


def measured(found: Sequence[Published]) -> One:
    """From published results; NaN where there are none of a kind."""
    throughput, overload = _of(found, "throughput_minilm"), _of(found, "overload")

    def per_core(case: str) -> float:
        client = _value(throughput, f"{case}: processor time of the client") / 100
        cores: float = throughput.get("machine", {}).get("cores", math.nan)
        return _value(throughput, f"{case}: served") / (cores * (1 - client))

    return One(
        mlp=1e6 / _value(overload, "MLP: server's processor time per call"),
        short=per_core("16 clients of 1 × 16"),
        long=per_core("16 clients of 1 × 128"),
        memory=_value(_of(found, "memory"), "bf16-serve without a reference"),
        message=_message_bytes(),
        series=_SERIES,
        scrape=_SCRAPE,
        samples=ShadowPolicy().max_per_second,
    )


def table(found: Sequence[Published]) -> str:
    """In Markdown, a column for each number of replicas."""
    one = measured(found)
    link = 2 * _HEADERS + one.message

    def times(value: float, unit: str, scale: float = 1.0) -> Callable[[int], str]:
        return lambda replicas: f"{_rounded(value * replicas * scale)} {unit}".rstrip() if value == value else "–"

    rows: dict[str, Callable[[int], str]] = {
        "16→16 MLP, requests per second": times(one.mlp, ""),
        "MiniLM, 16 tokens, requests per second": times(one.short, ""),
        "MiniLM, 128 tokens, requests per second": times(one.long, ""),
        "memory with MiniLM, no reference": times(one.memory, "GB", 1e-3),
        "network, MiniLM of 16 tokens, both ways": times(one.short * link * 8, "Gbit/s", 1e-9),
        "Prometheus: series": times(one.series, ""),
        f"Prometheus: samples per second, every {_SCRAPE_SECONDS} s": times(one.series / _SCRAPE_SECONDS, ""),
        "Prometheus: scraped": times(one.scrape / _SCRAPE_SECONDS, "kB/s", 1e-3),
        "drift: samples per second, at most": times(one.samples, ""),
        "connections, of 100 clients that balance over a headless Service": times(100, ""),
        "Ray: seconds between two reports of a replica": lambda n: _rounded(max(1.0, n / _REPORTS_PER_SECOND)),
    }
    lines = ["| replicas, a core each | " + " | ".join(map(str, REPLICAS)) + " |", "|---|" + "--:|" * len(REPLICAS)]
    lines += [f"| {name} | " + " | ".join(map(cell, REPLICAS)) + " |" for name, cell in rows.items()]
    return "\n".join(lines) + "\n"


def _rounded(value: float) -> str:
    """Two significant digits: more would claim a precision that no product of this kind has."""
    digits = float(f"{value:.2g}")
    return f"{digits:,.0f}" if digits >= 10 else f"{digits:g}"


def _of(found: Sequence[Published], benchmark: str) -> Mapping[str, Any]:
    """Of the last kind of machine that has it; nothing where none has."""
    return next((one.contents[benchmark] for one in reversed(found) if benchmark in one.contents), {})


def _value(result: Mapping[str, Any], name: str) -> float:
    """NaN where nobody measured it."""
    return next((float(each["value"]) for each in result.get("measurements", ()) if each["name"] == name), math.nan)


def _message_bytes() -> int:
    feeds = models.minilm_feeds(1, models.TOKENS)
    answer = pb.ModelInferResponse(model_name="minilm", model_version="1")
    answer.outputs.add(name="last_hidden_state", datatype="FP32", shape=(1, models.TOKENS, _HIDDEN))
    answer.raw_output_contents.append(bytes(4 * models.TOKENS * _HIDDEN))
    return len(wire.infer_request("minilm", feeds)) + answer.ByteSize()
