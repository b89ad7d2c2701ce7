"""What `bf16-serve` adds to a request: beside the least that a gRPC server around ONNX Runtime can be.

A 16→16 MLP, of which both run the same graph, and MiniLM, which the bare handler runs in fp32. Latency with one request
in flight, processor time of the server with eight. Blocks of calls take turns, and which side begins alternates: what
else the machine does falls on both. Latency has two levels that hold for the life of a process, depending on where the
kernel put its threads: hence fresh processes in each round, and a round is one observation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from bench.core import models
from bench.core.processes import Server, bare_handler, bf16_serve
from bench.core.results import Measurement, Result
from bench.core.rounds import Effort, Round, Turn, samples, take_turns
from bench.core.verdict import FEWEST_PROCESSES, ratio, typical
from bench.core.workspace import Workspace
from bench.kernel.models import fp32_graph
from bench.serving import wire
from bench.serving.client import Client

OURS, BARE = "bf16-serve", "a bare handler"
_IN_FLIGHT = 8
_P50, _P99, _BUSY = "p50", "p99", f"processor time per request, {_IN_FLIGHT} in flight"
_AT_MOST = {("MLP", _P50): 1.15}
_WARM_UP = 200
_US = 1e6
_FULL, _QUICK = Effort(FEWEST_PROCESSES, 6, 1.0), Effort(1, 2, 0.3)


@dataclass(frozen=True, slots=True)
class _Case:
    artifact: Path
    graph: Path  # of the bare handler
    feeds: Mapping[str, NDArray[Any]]
    calls: int  # of a block with one in flight


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """Ratios of both sides' neighbouring blocks, and what they are made of."""
    effort = _QUICK if quick else _FULL
    mlp, minilm = workspace.mlp(), workspace.minilm()
    fp32 = fp32_graph(minilm, workspace.root / "minilm_fp32" / "model.onnx")
    cases = {
        "MLP": _Case(mlp, mlp / "cpu.onnx", models.mlp_feeds(rows=1), 500),
        "MiniLM": _Case(minilm, fp32, models.minilm_feeds(1), 200),
    }
    found = {
        name: [_round(workspace, name, case, effort) for _ in range(effort.rounds)] for name, case in cases.items()
    }
    return Result(
        "served",
        tuple(each for name, rounds in found.items() for each in _measurements(name, rounds)),
        settings={
            "models": "16→64→16 MLP, the same graph on both sides; MiniLM, one row of 16 tokens, bare in fp32",
            "serving": "defaults",
            "rounds": effort.rounds,
            "blocks_per_round": effort.turns,
        },
        notes=("the client's own time is part of both sides' latency",),
    )


def _measurements(name: str, rounds: Sequence[Round]) -> Iterator[Measurement]:
    seconds = {what: samples(rounds, what) for what in (_P50, _P99, _BUSY)}
    for what, of in seconds.items():
        at_most = _AT_MOST.get((name, what))
        yield Measurement.of(f"{name}: {what}, {OURS} ÷ {BARE}", ratio(of[OURS], of[BARE]), at_most=at_most)
    for side in (OURS, BARE):
        for what, of in seconds.items():
            yield Measurement(f"{name}: {what}, {side}", typical(of[side]) * _US, "µs")


def _round(workspace: Workspace, name: str, case: _Case, effort: Effort) -> Round:
    """Blocks against one fresh process of each side."""
    repository = workspace.repository(f"served_{name}", case.artifact)
    request = wire.infer_request(case.artifact.parent.name, case.feeds)
    with ExitStack() as stack:
        servers = {
            OURS: stack.enter_context(bf16_serve(repository, workspace.root / "served.log")),
            BARE: stack.enter_context(bare_handler(case.graph)),
        }
        clients = {side: stack.enter_context(Client(server.port, request)) for side, server in servers.items()}
        for client in clients.values():
            client.latency(_WARM_UP)

        def block(server: Server, client: Client) -> Turn:
            latency = client.latency(case.calls)
            before = server.cpu_seconds()
            load = client.load(_IN_FLIGHT, effort.seconds)
            return {_P50: latency.p50, _P99: latency.p99, _BUSY: (server.cpu_seconds() - before) / load.calls}

        return take_turns({side: partial(block, servers[side], clients[side]) for side in servers}, effort.turns)
