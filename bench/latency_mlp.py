"""What `bf16-serve` adds to one request: a 16→16 MLP, one request in flight, against a bare grpcio handler.

The client code, the bytes it sends, the graph and the session's options are the same for both. Blocks take turns, and
which of the two goes first alternates, so that what else the machine does falls on both. Latency on a busy virtual
machine has two levels that hold for the life of a process, depending on where the kernel put its threads: hence several
rounds, each with processes of its own.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from statistics import median

from bench import models, wire
from bench.client import Client, Latency
from bench.processes import bare_handler, bf16_serve
from bench.results import Measurement, Result
from bench.workspace import Workspace

_AT_MOST = 1.15
_ROUNDS, _BLOCKS, _CALLS = 5, 10, 500
_QUICK = 1, 2, 100
_WARM_UP_CALLS = 500
_US = 1e6

Pair = tuple[Latency, Latency]  # of one block of bf16-serve, and of the bare handler's block beside it


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """The ratio of the two medians of the blocks' p50, and what it is made of."""
    rounds, blocks, calls = _QUICK if quick else (_ROUNDS, _BLOCKS, _CALLS)
    artifact = workspace.mlp()
    repository = workspace.repository("latency_mlp", artifact)
    log = workspace.root / "latency_mlp.log"
    pairs = [pair for _ in range(rounds) for pair in _round(repository, log, artifact / "cpu.onnx", blocks, calls)]
    served, bare = zip(*pairs, strict=True)
    ratios = [ours.p50 / theirs.p50 for ours, theirs in pairs]
    return Result(
        "latency_mlp",
        (
            Measurement("p50 ratio to a bare handler", _p50(served) / _p50(bare), at_most=_AT_MOST),
            Measurement("median of the paired ratios", median(ratios)),
            Measurement("smallest paired ratio", min(ratios)),
            Measurement("largest paired ratio", max(ratios)),
            Measurement("bf16-serve p50", _p50(served) * _US, "µs"),
            Measurement("bare handler p50", _p50(bare) * _US, "µs"),
            Measurement("bf16-serve p99", median(block.p99 for block in served) * _US, "µs"),
            Measurement("bare handler p99", median(block.p99 for block in bare) * _US, "µs"),
        ),
        settings={
            "model": "16→64→16 MLP, batch 1, profile cpu",
            "rounds": rounds,
            "blocks_per_round": blocks,
            "calls_per_block": calls,
            "serving": "defaults",
        },
        notes=("percentiles are medians over blocks; the client's own time is part of both",),
    )


def _round(repository: Path, log: Path, graph: Path, blocks: int, calls: int) -> list[Pair]:
    """Pairs of blocks against one fresh process of each kind."""
    feeds = models.mlp_feeds(rows=1)
    with ExitStack() as stack:
        servers = stack.enter_context(bf16_serve(repository, log)), stack.enter_context(bare_handler(graph))
        request = wire.infer_request("mlp", feeds)
        served, bare = (stack.enter_context(Client(server.port, request)) for server in servers)
        for client in (served, bare):
            client.latency(_WARM_UP_CALLS)
        return [_pair(served, bare, calls, served_first=block % 2 == 0) for block in range(blocks)]


def _pair(served: Client, bare: Client, calls: int, *, served_first: bool) -> Pair:
    if served_first:
        return served.latency(calls), bare.latency(calls)
    theirs = bare.latency(calls)
    return served.latency(calls), theirs


def _p50(blocks: tuple[Latency, ...]) -> float:
    return median(block.p50 for block in blocks)
