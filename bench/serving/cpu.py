"""What processor time `bf16-serve` adds to one request: a 16→16 MLP, eight requests in flight, against a bare handler.

User and system time of the server processes, per call. Blocks take turns, as in :mod:`bench.serving.latency`. The
server joins requests to batches and the bare handler does not, so both are also measured with batches of one.
"""

from __future__ import annotations

from contextlib import ExitStack
from statistics import median
from typing import NamedTuple

from bench.core import models
from bench.core.processes import Server, bare_handler, bf16_serve
from bench.core.results import Measurement, Result
from bench.core.workspace import Workspace
from bench.serving import wire
from bench.serving.client import Client

_IN_FLIGHT = 8
_AT_MOST_US = 80.0
_ROUNDS, _BLOCKS, _SECONDS = 5, 6, 1.5
_QUICK = 1, 2, 0.5
_SERVING = {"as it is": "", "no batches": "max_batch_size: 1\n"}


class _Block(NamedTuple):
    """Microseconds of processor time per call."""

    ours: float
    bare: float


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """The difference of the two medians."""
    rounds, blocks, seconds = _QUICK if quick else (_ROUNDS, _BLOCKS, _SECONDS)
    found = {
        how: [block for _ in range(rounds) for block in _round(workspace, serving, blocks, seconds)]
        for how, serving in _SERVING.items()
    }
    return Result(
        "cpu_mlp",
        tuple(entry for how, measured in found.items() for entry in _measurements(how, measured)),
        settings={
            "model": "16→64→16 MLP, batch 1, profile cpu",
            "rounds": rounds,
            "blocks_per_round": blocks,
            "seconds_per_block": seconds,
            "requests_in_flight": _IN_FLIGHT,
        },
        notes=("the processes' user and system time per call; medians over blocks",),
    )


def _measurements(how: str, blocks: list[_Block]) -> list[Measurement]:
    ours, bare = median(block.ours for block in blocks), median(block.bare for block in blocks)
    added = [block.ours - block.bare for block in blocks]
    return [
        Measurement(f"{how}: bf16-serve", ours, "µs"),
        Measurement(f"{how}: a bare handler", bare, "µs"),
        Measurement(f"{how}: added", ours - bare, "µs", at_most=_AT_MOST_US),
        Measurement(f"{how}: smallest added by a pair", min(added), "µs"),
        Measurement(f"{how}: largest added by a pair", max(added), "µs"),
    ]


def _round(workspace: Workspace, serving: str, blocks: int, seconds: float) -> list[_Block]:
    """Pairs of blocks against one fresh process of each kind."""
    artifact = workspace.mlp()
    request = wire.infer_request("mlp", models.mlp_feeds(rows=1))
    with ExitStack() as stack:
        repository = workspace.repository("cpu_mlp", artifact, serving)
        ours = stack.enter_context(bf16_serve(repository, workspace.root / "cpu_mlp.log"))
        bare = stack.enter_context(bare_handler(artifact / "cpu.onnx"))
        clients = [(server, stack.enter_context(Client(server.port, request))) for server in (ours, bare)]
        for server, client in clients:
            _per_call(server, client, seconds / 2)
        return [_pair(clients, seconds, in_order=block % 2 == 0) for block in range(blocks)]


def _pair(clients: list[tuple[Server, Client]], seconds: float, *, in_order: bool) -> _Block:
    found = {server.port: _per_call(server, client, seconds) for server, client in clients[:: 1 if in_order else -1]}
    return _Block(*(found[server.port] for server, _ in clients))


def _per_call(server: Server, client: Client, seconds: float) -> float:
    before = server.cpu_seconds()
    calls = client.load(_IN_FLIGHT, seconds, "http2").calls
    return (server.cpu_seconds() - before) / calls * 1e6
