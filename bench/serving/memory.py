"""The memory of a server of MiniLM with its defaults, beside a bare handler around ONNX Runtime in fp32.

The proportional set size counts a page that n processes share as an nth of it: added up over all processes of a server
it is what the server takes. With its defaults that includes the process that measures live drift, which holds the fp32
reference while that runs. Fresh servers in each round, idle when they are measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from statistics import median

import grpc

from bench.core import models
from bench.core.processes import Server, bare_handler, bf16_serve, drift_samples, proportional_bytes
from bench.core.results import Measurement, Result
from bench.core.verdict import FEWEST_PROCESSES, ratio
from bench.core.workspace import Workspace
from bench.kernel.models import fp32_graph
from bench.serving import wire

_AT_MOST_MB = 200
_IDLE_S = 5.0  # until what requests took is given back
_CONNECTIONS, _REQUESTS = 12, 8
_REFERENCE_S = 60.0  # until a sample was measured, at most
_PAUSE_S = 0.05
_MB = 1e6
DEFAULTS, TWO, ALONE, FP32 = "defaults", "two workers", "no reference", "fp32"
_NO_REFERENCE = "shadow:\n  rate: 0\n"


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """Four servers in turn, each by itself: ours thrice, and the bare one. The reference is one for all workers."""
    artifact, log = workspace.minilm(), workspace.root / "memory.log"
    graph = fp32_graph(artifact, workspace.root / "minilm_fp32" / "model.onnx")
    ours = workspace.repository("memory", artifact)
    without = workspace.repository("memory_without", artifact, _NO_REFERENCE)
    sides: Mapping[str, Callable[[], AbstractContextManager[Server]]] = {
        DEFAULTS: lambda: bf16_serve(ours, log),
        TWO: lambda: bf16_serve(without, log, "--workers", "2"),
        ALONE: lambda: bf16_serve(without, log),
        FP32: lambda: bare_handler(graph),
    }
    rounds = 1 if quick else FEWEST_PROCESSES
    request = wire.infer_request("minilm", models.minilm_feeds(1))
    idle: dict[str, list[int]] = {side: [] for side in sides}
    most, started = list[int](), list[float]()
    for _ in range(rounds):
        for side, start in sides.items():
            with start() as server:
                _ask(server.port, request)
                if side == DEFAULTS:
                    most.append(_peak(server, request))
                    started.append(server.started_s)
                time.sleep(_IDLE_S)
                idle[side].append(proportional_bytes(server))
    further = [two - one for two, one in zip(idle[TWO], idle[ALONE], strict=True)]
    return Result(
        "memory",
        (
            Measurement("bf16-serve with its defaults", median(idle[DEFAULTS]) / _MB, "MB", at_most=_AT_MOST_MB),
            Measurement("the same while its reference runs, at most", median(most) / _MB, "MB"),
            Measurement("bf16-serve without a reference", median(idle[ALONE]) / _MB, "MB"),
            Measurement("a bare handler, ONNX Runtime fp32", median(idle[FP32]) / _MB, "MB"),
            _ratio("defaults ÷ a bare handler", idle[DEFAULTS], idle[FP32]),
            _ratio("while its reference runs ÷ a bare handler", most, idle[FP32]),
            _ratio("without a reference ÷ a bare handler", idle[ALONE], idle[FP32]),
            Measurement("one more worker", median(further) / _MB, "MB"),
            Measurement("start to ready, with its defaults", median(started), "s", at_most=3.0),
        ),
        settings={"model": "all-MiniLM-L6-v2", "rounds": rounds, "requests": _CONNECTIONS * _REQUESTS},
        notes=(f"proportional set sizes of all processes of a server, {_IDLE_S:g} s after the last request",),
    )


def _ratio(name: str, above: list[int], below: list[int]) -> Measurement:
    return Measurement.of(name, ratio([[[a]] for a in above], [[[b]] for b in below]))


def _ask(port: int, request: bytes) -> None:
    """Over one connection after the other: each goes to whichever worker the system likes."""
    for _ in range(_CONNECTIONS):
        with grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
            infer: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(wire.INFER)
            for _ in range(_REQUESTS):
                infer(request, timeout=60)


def _peak(server: Server, request: bytes) -> int:
    """The most that is seen while requests come in, until live drift was measured."""
    peak, deadline = 0, time.monotonic() + _REFERENCE_S
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        infer: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(wire.INFER)
        while time.monotonic() < deadline:
            infer(request, timeout=60)
            peak = max(peak, proportional_bytes(server))
            if drift_samples(server).get(("minilm", "measured"), 0) > 1:
                return peak
            time.sleep(_PAUSE_S)
    raise RuntimeError(f"no live drift was measured within {_REFERENCE_S:g} s")
