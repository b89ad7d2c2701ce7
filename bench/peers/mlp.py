"""A 16→16 MLP served by `bf16-serve`, MLServer and PyTriton to 1, 8 and 32 requests in flight, in turns.

Fresh processes of all of them in each round, whose turns alternate in direction. Clients and servers share the cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median

from bench.core import models
from bench.core.grid import Grid
from bench.core.results import Measurement, Result
from bench.core.verdict import FEWEST_PROCESSES, ratio, typical
from bench.core.workspace import Workspace
from bench.peers import environments
from bench.peers.contenders import OURS, OURS_WORKERS, Case, Contender, contenders
from bench.serving import wire
from bench.serving.client import Client

_AT_LEAST = 1.5
_IN_FLIGHT = (1, 8, 32)
_WARM_UP_S = 0.5
_CONNECTIONS = 16  # at most: each belongs to one of a server's processes, and chance decides which


@dataclass(frozen=True, slots=True)
class _Effort:
    rounds: int
    turns: int
    seconds: float


_FULL, _QUICK = _Effort(FEWEST_PROCESSES, 3, 1.5), _Effort(1, 1, 0.5)


@dataclass(slots=True)
class _Found:
    """By contender: seconds per request by round and turn, and processor microseconds per request of every turn."""

    seconds: dict[str, list[list[list[float]]]] = field(default_factory=dict)
    cpu_us: dict[str, list[float]] = field(default_factory=dict)


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """Our requests per second over the better peer's, for each number in flight."""
    try:
        versions = environments.versions()
    except RuntimeError as error:
        return Result("peers_mlp", skipped=str(error))
    effort = _QUICK if quick else _FULL
    servers = contenders(workspace, Case("mlp", workspace.root / "mlp.onnx", workspace.mlp()))
    request = wire.infer_request("mlp", models.mlp_feeds(rows=1))
    found = {number: _Found() for number in _IN_FLIGHT}
    for _ in range(effort.rounds):
        _round(servers, request, found, effort)
    columns = [server.name for server in servers]
    named = {f"{number} in flight": of for number, of in found.items()}
    rates = {what: [1 / typical(of.seconds[name]) for name in columns] for what, of in named.items()}
    costs = {what: [median(of.cpu_us[name]) for name in columns] for what, of in named.items()}
    return Result(
        "peers_mlp",
        [entry for what, of in named.items() for entry in _judged(what, of)],
        settings={
            "model": "16→64→16 MLP, one row",
            **versions,
            "not_defaults": {server.name: server.settings for server in servers if server.settings},
            "rounds": effort.rounds,
            "turns": effort.turns,
            "seconds_per_turn": effort.seconds,
            "connections": f"one for each request in flight, {_CONNECTIONS} at most",
        },
        notes=("processor time is user and system time of a server's processes, per request",),
        grids=(
            Grid("requests per second", "1/s", columns, rates),
            Grid("processor time per request", "µs", columns, costs),
        ),
        samples={what: of.seconds for what, of in named.items()},
    )


def _round(servers: Sequence[Contender], request: bytes, found: dict[int, _Found], effort: _Effort) -> None:
    with ExitStack() as stack:
        running = {each.name: stack.enter_context(each.start()) for each in servers}
        clients = {name: stack.enter_context(Client(server.port, request)) for name, server in running.items()}
        for client in clients.values():
            client.load(_CONNECTIONS, _WARM_UP_S, _CONNECTIONS)
        for number, into in found.items():
            turns: dict[str, list[list[float]]] = {name: [] for name in running}
            for turn in range(effort.turns):
                for name in list(running)[:: 1 if turn % 2 == 0 else -1]:
                    before = running[name].cpu_seconds()
                    load = clients[name].load(number, effort.seconds, min(number, _CONNECTIONS))
                    used = (running[name].cpu_seconds() - before) / load.calls
                    turns[name].append([load.seconds / load.calls])
                    into.cpu_us.setdefault(name, []).append(used * 1e6)
            for name, taken in turns.items():
                into.seconds.setdefault(name, []).append(taken)


def _judged(what: str, found: _Found) -> list[Measurement]:
    peers = [name for name in found.seconds if name not in (OURS, OURS_WORKERS)]
    best = min(peers, key=lambda name: typical(found.seconds[name]))
    return [
        Measurement.of(
            f"{what}: {ours} against {best}",
            ratio(found.seconds[best], found.seconds[ours]),
            at_least=_AT_LEAST,
            detail="requests per second, ours over theirs",
        )
        for ours in (OURS, OURS_WORKERS)
    ]
