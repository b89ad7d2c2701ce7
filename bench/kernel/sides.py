"""Who is measured: our profiles on each path of the kernel, every peer at its defaults and at its best, and the limit
of the processor itself.

A side is a name and what :mod:`bench.kernel.worker` needs to open it; nothing here imports a peer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from bf16kit.runtime import available_cpus

Arithmetic = Literal["fp32", "bf16"]
THREADS = available_cpus()

_LATENCY = {
    "PERFORMANCE_HINT": "LATENCY",
    "NUM_STREAMS": "1",
    "INFERENCE_NUM_THREADS": str(THREADS),
    "ENABLE_CPU_PINNING": "NO",
}
_SPINNING = "session.intra_op.allow_spinning"
_STOPPING = "session.force_spinning_stop"


@dataclass(frozen=True, slots=True)
class Side:
    """``host`` is the module of :mod:`bench.kernel.hosts` that opens it with ``options``; sides of the same ``process``
    run in one, each on its own copy of the weights. A ``limit`` is no program but what the processor can do."""

    name: str
    host: str
    arithmetic: Arithmetic
    process: str
    options: Mapping[str, str] = field(default_factory=dict)
    ours: bool = False
    limit: bool = False

    @property
    def reads_stored(self) -> bool:
        """Whether it is OpenVINO at its best, which is given the graph whose matrices are stored in bf16."""
        return "PERFORMANCE_HINT" in self.options


OURS = (
    Side("cpu, avx512f", "ours", "fp32", "avx512f", {"profile": "cpu", "path": "avx512f"}, ours=True),
    Side("cpu, avx2", "ours", "fp32", "avx2", {"profile": "cpu", "path": "avx2"}, ours=True),
    Side("cpu-bf16", "ours", "bf16", "bf16", {"profile": "cpu-bf16", "path": ""}, ours=True),
)
ONNX_RUNTIME = Side("ONNX Runtime fp32", "onnxruntime", "fp32", "onnxruntime")
PEERS = (
    ONNX_RUNTIME,
    Side("ONNX Runtime fp32, spinning off", "onnxruntime", "fp32", "onnxruntime", {_SPINNING: "0"}),
    Side("ONNX Runtime fp32, spinning in runs", "onnxruntime", "fp32", "onnxruntime", {_STOPPING: "1"}),
    Side("OpenVINO fp32", "openvino", "fp32", "openvino", {"INFERENCE_PRECISION_HINT": "f32"}),
    Side("OpenVINO fp32, latency", "openvino", "fp32", "openvino", {"INFERENCE_PRECISION_HINT": "f32"} | _LATENCY),
    Side("OpenVINO bf16", "openvino", "bf16", "openvino"),
    Side("OpenVINO bf16, latency", "openvino", "bf16", "openvino", {"INFERENCE_PRECISION_HINT": "bf16"} | _LATENCY),
    Side("torch fp32", "torch", "fp32", "torch", {"dtype": "float32"}),
    Side("torch fp32, compiled", "torch", "fp32", "torch fp32", {"dtype": "float32", "compiled": "inductor"}),
    Side("torch bf16", "torch", "bf16", "torch", {"dtype": "bfloat16"}),
    Side("torch bf16, compiled", "torch", "bf16", "torch bf16", {"dtype": "bfloat16", "compiled": "inductor"}),
    Side("torch bf16, zentorch", "torch", "bf16", "zentorch", {"dtype": "bfloat16", "compiled": "zentorch"}),
)
LIMIT = Side("limit: bf16 arithmetic", "limits", "bf16", "limits", limit=True)
PROFILES = tuple(dict.fromkeys(side.options["profile"] for side in OURS))

SETTINGS = {
    "threads": THREADS,
    "turns": "every side in a process of its library's own, each on its own copy of the weights; a turn is one run that"
    " does not count and then those that do; turns in an order drawn anew; the next begins when the last one's threads"
    " sleep",
    "contenders": "what users get of our profiles, the limit, and peers that in the first process took less than 1.3"
    " times as long as the best of their arithmetic: they have further turns of their own, and further processes",
    "cold": "a buffer of three times the last-level cache is read before each run",
    "warm": "runs of a turn follow each other at once",
    "ONNX Runtime": "defaults; spinning off; session.force_spinning_stop",
    "OpenVINO": "defaults, precision given for fp32 only; and LATENCY, one stream, no pinning, from weights stored in"
    " bf16",
    "torch": f"eager, and torch.compile with freezing, by its own backend and by AMD's zentorch, {THREADS} threads",
}


def side(name: str) -> Side:
    """The side called ``name``."""
    return next(found for found in (*OURS, *PEERS, LIMIT) if found.name == name)


def path_of(profile: str, ran: Collection[str]) -> str | None:
    """The side that is what users get of ``profile``: the first of its paths that ran."""
    return next((ours.name for ours in OURS if ours.options["profile"] == profile and ours.name in ran), None)
