"""The sizing table of docs/scaling.md, computed from published results.

Nothing here was measured at these numbers of replicas: what one does is multiplied. What that leaves out is said on the
page, and where the product meets a limit that is known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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


def table(found: Sequence[Published]) -> str:
    """In Markdown, a column for each number of replicas; a dash for what nobody measured."""
    short = _per_core(found, "16 clients of 1 × 16")
    link = 2 * _HEADERS + _message_bytes()
    # Of one replica of one core: a number, and the unit that it is given in.
    one: dict[str, tuple[float, str]] = {
        "16→16 MLP, requests per second": (
            1e6 / _value(found, "overload", "MLP: server's processor time per call"),
            "",
        ),
        "MiniLM, 16 tokens, requests per second": (short, ""),
        "MiniLM, 128 tokens, requests per second": (_per_core(found, "16 clients of 1 × 128"), ""),
        "memory with MiniLM, no reference": (_value(found, "memory", "bf16-serve without a reference") / 1e3, "GB"),
        "network, MiniLM of 16 tokens, both ways": (short * link * 8 / 1e9, "Gbit/s"),
        "Prometheus: series": (_SERIES, ""),
        f"Prometheus: samples per second, every {_SCRAPE_SECONDS} s": (_SERIES / _SCRAPE_SECONDS, ""),
        "Prometheus: scraped": (_SCRAPE / _SCRAPE_SECONDS / 1e3, "kB/s"),
        "drift: samples per second, at most": (ShadowPolicy().max_per_second, ""),
        "connections, of 100 clients that balance over a headless Service": (100, ""),
    }
    rows = {name: [_cell(value * replicas, unit) for replicas in REPLICAS] for name, (value, unit) in one.items()}
    reports = [_cell(max(1.0, replicas / _REPORTS_PER_SECOND)) for replicas in REPLICAS]
    rows["Ray: seconds between two reports of a replica"] = reports
    lines = ["| replicas, a core each | " + " | ".join(map(str, REPLICAS)) + " |", "|---|" + "--:|" * len(REPLICAS)]
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    return "\n".join(lines) + "\n"


def _cell(value: float, unit: str = "") -> str:
    """Two significant digits: more would claim a precision that no product of this kind has."""
    if math.isnan(value):
        return "–"
    digits = float(f"{value:.2g}")
    return f"{f'{digits:,.0f}' if digits >= 10 else f'{digits:g}'} {unit}".rstrip()


def _per_core(found: Sequence[Published], case: str) -> float:
    """Rows per second of a core that only serves."""
    client = _value(found, "throughput_minilm", f"{case}: processor time of the client") / 100
    of = _last(found, "throughput_minilm")
    cores = of.contents["throughput_minilm"]["machine"].get("cores", math.nan) if of else math.nan
    return _value(found, "throughput_minilm", f"{case}: served") / (cores * (1 - client))


def _last(found: Sequence[Published], benchmark: str) -> Published | None:
    """The last kind of machine that has it."""
    return next((one for one in reversed(found) if benchmark in one.contents), None)


def _value(found: Sequence[Published], benchmark: str, name: str) -> float:
    """NaN where nobody measured it."""
    of = _last(found, benchmark)
    one = of.find(benchmark, name) if of else None
    return float(one["value"]) if one else math.nan


def _message_bytes() -> int:
    """Of a request for MiniLM of 16 tokens, and of its answer."""
    feeds = models.minilm_feeds(1, models.TOKENS)
    answer = pb.ModelInferResponse(model_name="minilm", model_version="1")
    answer.outputs.add(name="last_hidden_state", datatype="FP32", shape=(1, models.TOKENS, _HIDDEN))
    answer.raw_output_contents.append(bytes(4 * models.TOKENS * _HIDDEN))
    return len(wire.infer_request("minilm", feeds)) + answer.ByteSize()
