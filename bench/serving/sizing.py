"""The sizing table of docs/scaling.md, computed from what ``bench/results`` has: ``python -m bench.serving.sizing``.

Nothing here was measured at these numbers of replicas: what one does is multiplied. What that leaves out is said on the
page, and where the product meets a limit that is known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.core import models
from bench.serving import wire
from bf16kit.protocol import inference_pb2 as pb
from service.drift.driftpolicy import ShadowPolicy

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "scaling.md"
REPLICAS = (1, 10, 100, 1000)
_BLOCK = re.compile(r"(<!-- sizing: python -m bench\.serving\.sizing -->\n).*?(<!-- /sizing -->)", re.DOTALL)
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
    ray: float | None  # processor seconds of Ray per request, beyond the server's own; None: not measured yet


def measured() -> One:
    """From the newest kind of machine that has each."""
    throughput, memory = _of("throughput_minilm"), _of("workers_memory")
    cores = throughput["machine"]["cores"]

    def per_core(case: str) -> float:
        client = _value(throughput, f"{case}: processor time of the client") / 100
        rate: float = _value(throughput, f"{case}: served") / (cores * (1 - client))
        return rate

    weights = _value(memory, "weights that all workers share")
    return One(
        mlp=1e6 / _value(_of("cpu_mlp"), "as it is: bf16-serve"),
        short=per_core("16 clients of 1 × 16"),
        long=per_core("16 clients of 1 × 128"),
        memory=_value(memory, "a further process, a worker with MiniLM: private") + weights,
        message=_message_bytes(),
        series=_SERIES,
        scrape=_SCRAPE,
        samples=ShadowPolicy().max_per_second,
        ray=_ray(),
    )


def table() -> str:
    """In Markdown, a column for each number of replicas."""
    one = measured()
    link = 2 * _HEADERS + one.message

    def times(value: float, unit: str, scale: float = 1.0) -> Callable[[int], str]:
        return lambda replicas: f"{_rounded(value * replicas * scale)} {unit}".rstrip()

    def proxies(replicas: int) -> str:
        return "–" if one.ray is None else _rounded(one.short * replicas * one.ray)

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
        "Ray: cores for its proxies and its part of replicas, MiniLM of 16 tokens": proxies,
    }
    lines = ["| replicas, a core each | " + " | ".join(map(str, REPLICAS)) + " |", "|---|" + "--:|" * len(REPLICAS)]
    lines += [f"| {name} | " + " | ".join(map(cell, REPLICAS)) + " |" for name, cell in rows.items()]
    return "\n".join(lines) + "\n"


def page() -> str:
    """The page with the table as it is now."""
    text, replaced = _BLOCK.subn(lambda found: found[1] + table() + found[2], PAGE.read_text("utf-8"))
    assert replaced == 1, f"{PAGE} has no place for the table"
    return text


def _rounded(value: float) -> str:
    """Two significant digits: more would claim a precision that no product of this kind has."""
    digits = float(f"{value:.2g}")
    return f"{digits:,.0f}" if digits >= 10 else f"{digits:g}"


def _of(benchmark: str) -> dict[str, Any]:
    found = sorted((ROOT / "bench" / "results").glob(f"*/{benchmark}.json"))
    content: dict[str, Any] = json.loads(found[-1].read_text("utf-8"))
    return content


def _value(result: dict[str, Any], name: str) -> float:
    return next(float(each["value"]) for each in result["measurements"] if each["name"] == name)


def _ray() -> float | None:
    try:
        result = _of("ray")
    except IndexError:
        return None
    case = "MiniLM, 16 in flight"
    both = [_value(result, f"{case}: {side}, processor time per request") for side in ("Ray Serve", "bf16-serve")]
    return (both[0] - both[1]) / 1e3


def _message_bytes() -> int:
    feeds = models.minilm_feeds(1, models.TOKENS)
    answer = pb.ModelInferResponse(model_name="minilm", model_version="1")
    answer.outputs.add(name="last_hidden_state", datatype="FP32", shape=(1, models.TOKENS, _HIDDEN))
    answer.raw_output_contents.append(bytes(4 * models.TOKENS * _HIDDEN))
    return len(wire.infer_request("minilm", feeds)) + answer.ByteSize()


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
