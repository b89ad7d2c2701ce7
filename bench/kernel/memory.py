"""The memory of a model on the CPU kernel, against ONNX Runtime in fp32: of one process, and of four servers.

Fresh processes each time. Resident memory counts every page a process holds; the proportional set size counts a page
that n processes share, as those of the mapped bf16 weights are, as an nth of it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from statistics import median

from bench.core import models
from bench.core.processes import Server, bare_handler, bf16_serve
from bench.core.results import Measurement, Result
from bench.core.workspace import Workspace
from bench.kernel import models as kernel_models
from bench.kernel.layers import LAYERS
from bench.kernel.process import Memory, memory
from bench.kernel.sides import ours
from bench.serving import wire
from bench.serving.client import Client

_ONE_AT_MOST, _FOUR_AT_MOST = 0.55, 0.20
_SERVERS = 4
_BIG_LAYERS, _QUICK_BIG_LAYERS = 16, 6
# The shadow would load the fp32 reference, from the residual where there is one, and the MLP has one.
_SERVING = "weights: mapped\nshadow:\n  rate: 0\n"
_REPEATS, _QUICK_REPEATS = 5, 1
_MB = 1e6


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """One loaded model after minus before, then four processes of each kind."""
    graph, artifact = kernel_models.layers(workspace, LAYERS)
    kernel = ours(artifact)
    if kernel.absent:
        return Result("kernel_memory", skipped=kernel.absent)
    repeats, big = (_QUICK_REPEATS, _QUICK_BIG_LAYERS) if quick else (_REPEATS, _BIG_LAYERS)
    return Result(
        "kernel_memory",
        [*_one(graph, artifact, repeats), *_four(workspace, big)],
        settings={
            "one_process": f"{LAYERS} layers of 4096×4096, one run, medians of {repeats} processes",
            "servers": f"{_SERVERS} of each kind at once on {big} layers of 4096×4096, each asked twice: bf16-serve"
            " with its defaults but no shadow, and bench/serving/bare.py's grpcio handler around ONNX Runtime in fp32",
            "baseline": "the same processes serving a 16→64→16 MLP",
        },
        notes=(
            "the fp32 graph keeps its weights in a file beside it, which ONNX Runtime maps",
            "the servers run without the shadow, whose fp32 reference takes each as much as an fp32 process",
        ),
    )


# --- one process ------------------------------------------------------------------------------------------------------


def _one(graph: Path, artifact: Path, repeats: int) -> Iterator[Measurement]:
    bf16 = [_taken("ours", artifact) for _ in range(repeats)]
    fp32 = [_taken("fp32", graph) for _ in range(repeats)]
    resident = [median(taken.resident for taken in side) for side in (bf16, fp32)]
    proportional = [median(taken.proportional for taken in side) for side in (bf16, fp32)]
    yield Measurement("loaded model, resident: ours ÷ fp32", resident[0] / resident[1], at_most=_ONE_AT_MOST)
    yield Measurement(
        "loaded model, proportional: ours ÷ fp32", proportional[0] / proportional[1], at_most=_ONE_AT_MOST
    )
    yield Measurement("loaded model, resident, ours", resident[0] / _MB, "MB")
    yield Measurement("loaded model, resident, fp32", resident[1] / _MB, "MB")


def _taken(kind: str, model: Path) -> Memory:
    command = [sys.executable, "-m", "bench.kernel.process", kind, str(model)]
    done = subprocess.run(command, cwd=models.ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout)
    assert (kind == "ours") == bool(found["kernel"]), found
    return Memory(found["resident"], found["proportional"])


# --- four servers -----------------------------------------------------------------------------------------------------


def _four(workspace: Workspace, layers: int) -> Iterator[Measurement]:
    graph, artifact = kernel_models.layers(workspace, layers)
    small = workspace.mlp()
    log = workspace.root / "kernel_memory.log"

    def served(artifact: Path) -> Callable[[], AbstractContextManager[Server]]:
        repository = workspace.repository(f"kernel_memory_{artifact.parent.name}", artifact, _SERVING)
        return lambda: bf16_serve(repository, log)

    name, request = artifact.parent.name, wire.infer_request(artifact.parent.name, kernel_models.feeds(1))
    asked = wire.infer_request("mlp", models.mlp_feeds(1))
    bf16, fp32 = _sum(served(artifact), request), _sum(lambda: bare_handler(graph), request)
    base16, base32 = _sum(served(small), asked), _sum(lambda: bare_handler(small / "cpu.onnx"), asked)
    four = f"{_SERVERS} servers of {name}, proportional"
    yield Measurement(f"{four}: ours ÷ fp32", bf16 / fp32, at_most=_FOUR_AT_MOST)
    yield Measurement(f"{four}: the same beyond the baseline", (bf16 - base16) / (fp32 - base32))
    yield Measurement(f"{four}, ours", bf16 / _MB, "MB")
    yield Measurement(f"{four}, fp32", fp32 / _MB, "MB")
    yield Measurement(f"{_SERVERS} baselines, ours", base16 / _MB, "MB")
    yield Measurement(f"{_SERVERS} baselines, fp32", base32 / _MB, "MB")


def _sum(start: Callable[[], AbstractContextManager[Server]], request: bytes) -> int:
    """The proportional set sizes of four processes running at once, each asked twice, added up."""
    with ExitStack() as stack:
        servers = [stack.enter_context(start()) for _ in range(_SERVERS)]
        for server in servers:
            stack.enter_context(Client(server.port, request)).latency(2)
        return sum(memory(server.process.pid).proportional for server in servers)
