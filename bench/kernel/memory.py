"""The memory of a model on the CPU kernel, against ONNX Runtime in fp32: of one process, and of four servers.

Fresh processes each time. Resident memory counts every page a process holds; the proportional set size counts a page
that n processes share, as those of the mapped bf16 weights are, as an nth of it. ONNX Runtime repacks fp32 weights into
memory of its own unless it is told not to: the goals are against sessions that were told, and keep the mapped file.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from statistics import median

import numpy as np

from bench.core import models
from bench.core.processes import Server, bare_handler, bf16_serve
from bench.core.results import Measurement, Result
from bench.core.verdict import FEWEST_PROCESSES, Estimate, estimate
from bench.core.workspace import Workspace
from bench.kernel import models as kernel_models
from bench.kernel.hosts import Absent, Subject
from bench.kernel.hosts.ours import open_side
from bench.kernel.layers import LAYERS
from bench.kernel.process import Memory, memory
from bench.serving import wire
from bench.serving.client import Client

_ONE_AT_MOST, _FOUR_AT_MOST = 0.53, 0.20
_SERVERS = 4
_BIG_LAYERS, _QUICK_BIG_LAYERS = 16, 6
# The shadow would load the fp32 reference, from the residual where there is one, and the MLP has one.
_SERVING = "profile: cpu\nshadow:\n  rate: 0\n"
_REPEATS, _QUICK_REPEATS = FEWEST_PROCESSES, 1
_MB = 1e6
_KINDS = ("ours", "unpacked", "fp32")


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """One loaded model after minus before, then four processes of each kind."""
    graph, artifact = kernel_models.layers(workspace, LAYERS)
    try:
        open_side({"profile": "cpu", "path": ""}, Subject("layers", artifact, graph, graph))
    except Absent as reason:
        return Result("kernel_memory", skipped=str(reason))
    repeats, big = (_QUICK_REPEATS, _QUICK_BIG_LAYERS) if quick else (_REPEATS, _BIG_LAYERS)
    return Result(
        "kernel_memory",
        [*_one(graph, artifact, repeats), *_four(workspace, big)],
        settings={
            "one_process": f"{LAYERS} layers of 4096×4096, one run, {repeats} processes of each kind",
            "servers": f"{_SERVERS} of each kind at once on {big} layers of 4096×4096, each asked twice: bf16-serve"
            " without a shadow, and bench/serving/bare.py's handler around ONNX Runtime fp32",
            "baseline": "the same processes serving a 16→64→16 MLP",
        },
        notes=(
            "the fp32 graph keeps its weights in a file beside it, which ONNX Runtime maps",
            "the servers run without the shadow, whose fp32 reference takes each as much as an fp32 process",
        ),
    )


# --- one process ------------------------------------------------------------------------------------------------------


def _one(graph: Path, artifact: Path, repeats: int) -> Iterator[Measurement]:
    taken = {kind: list[Memory]() for kind in _KINDS}
    for _ in range(repeats):
        for kind in _KINDS:
            taken[kind].append(_taken(kind, artifact if kind == "ours" else graph))
    resident = {kind: [found.resident for found in side] for kind, side in taken.items()}
    yield Measurement.of(
        "loaded model: ours ÷ fp32, prepacking off",
        _ratio(resident["ours"], resident["unpacked"]),
        at_most=_ONE_AT_MOST,
    )
    yield Measurement.of("loaded model: ours ÷ fp32, its defaults", _ratio(resident["ours"], resident["fp32"]))
    for kind, found in resident.items():
        yield Measurement(f"loaded model, {kind}", median(found) / _MB, "MB")


def _ratio(ours: Sequence[int], theirs: Sequence[int]) -> Estimate:
    return estimate([np.array([mine / their]) for mine, their in zip(ours, theirs, strict=True)])


def _taken(kind: str, model: Path) -> Memory:
    command = [sys.executable, "-m", "bench.kernel.process", kind, str(model)]
    done = subprocess.run(command, cwd=models.ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout)
    assert (kind == "ours") == bool(found["kernel"]), found
    return Memory(found["resident"], found["proportional"])


# --- four servers -----------------------------------------------------------------------------------------------------


def _four(workspace: Workspace, layers: int) -> Iterator[Measurement]:
    graph, artifact = kernel_models.layers(workspace, layers)
    small, log = workspace.mlp(), workspace.root / "kernel_memory.log"

    def served(artifact: Path) -> Callable[[], AbstractContextManager[Server]]:
        repository = workspace.repository(f"kernel_memory_{artifact.parent.name}", artifact, _SERVING)
        return lambda: bf16_serve(repository, log)

    name, request = artifact.parent.name, wire.infer_request(artifact.parent.name, kernel_models.feeds(1))
    request = wire.infer_request("mlp", models.mlp_feeds(1))
    bf16, packed = _sum(served(artifact), request), _sum(lambda: bare_handler(graph), request)
    unpacked = _sum(lambda: bare_handler(graph, "--unpacked"), request)
    base16, base32 = _sum(served(small), request), _sum(lambda: bare_handler(small / "cpu.onnx"), request)
    four = f"{_SERVERS} servers of {name}, proportional"
    yield Measurement(f"{four}: ours ÷ fp32, prepacking off", bf16 / unpacked, at_most=_FOUR_AT_MOST)
    yield Measurement(f"{four}: ours ÷ fp32, its defaults", bf16 / packed)
    beyond = (bf16 - base16) / (unpacked - base32)
    yield Measurement(f"{four}, beyond their baselines: ours ÷ fp32, prepacking off", beyond)
    for kind, found in {"ours": bf16, "fp32, prepacking off": unpacked, "fp32, its defaults": packed}.items():
        yield Measurement(f"{four}, {kind}", found / _MB, "MB")
    yield Measurement(f"{_SERVERS} baselines, ours", base16 / _MB, "MB")
    yield Measurement(f"{_SERVERS} baselines, fp32", base32 / _MB, "MB")


def _sum(start: Callable[[], AbstractContextManager[Server]], request: bytes) -> int:
    """The proportional set sizes of four processes running at once, each asked twice, added up."""
    with ExitStack() as stack:
        servers = [stack.enter_context(start()) for _ in range(_SERVERS)]
        for server in servers:
            stack.enter_context(Client(server.port, request)).latency(2)
        return sum(memory(server.process.pid).proportional for server in servers)
