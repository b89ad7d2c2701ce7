"""A 16→16 MLP served by `bf16-serve`, MLServer and PyTriton to 1, 8 and 32 requests in flight, in turns.

Fresh processes of all of them in each round. Clients and servers share the cores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from bench.core import models
from bench.core.results import Grid, Measurement, Result
from bench.core.rounds import Effort, Round, Turn, samples, take_turns
from bench.core.verdict import FEWEST_PROCESSES, Samples, ratio, typical
from bench.core.workspace import Workspace
from bench.peers import environments
from bench.peers.contenders import OURS, OURS_WORKERS, Contender, contenders
from bench.serving import wire
from bench.serving.client import Client

_AT_LEAST = 1.5
_IN_FLIGHT = (1, 8, 32)
_WARM_UP_S = 0.5
_CONNECTIONS = 16  # at most: each belongs to one of a server's processes, and chance decides which
_FULL, _QUICK = Effort(FEWEST_PROCESSES, 3, 1.5), Effort(1, 1, 0.5)
_TIME, _BUSY = "time per request", "processor time per request"


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """Our requests per second over the better peer's, for each number in flight."""
    try:
        versions = environments.versions()
    except RuntimeError as error:
        return Result("peers_mlp", skipped=str(error))
    effort = _QUICK if quick else _FULL
    servers = contenders(workspace)
    found: dict[int, list[Round]] = {number: [] for number in _IN_FLIGHT}
    for _ in range(effort.rounds):
        _round(servers, found, effort)
    seconds = {f"{number} in flight": samples(rounds, _TIME) for number, rounds in found.items()}
    busy = {f"{number} in flight": samples(rounds, _BUSY) for number, rounds in found.items()}
    columns = [server.name for server in servers]
    rates = {what: [1 / typical(of[name]) for name in columns] for what, of in seconds.items()}
    costs = {what: [1e6 * typical(of[name]) for name in columns] for what, of in busy.items()}
    return Result(
        "peers_mlp",
        [
            Measurement.of(
                f"{what}: {ours} against {best}",
                ratio(of[best], of[ours]),
                at_least=_AT_LEAST,
                detail="requests per second, ours over theirs",
            )
            for what, of in seconds.items()
            for best in [_best(of)]
            for ours in (OURS, OURS_WORKERS)
        ],
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
        grids=(Grid("requests per second", "1/s", columns, rates), Grid(_BUSY, "µs", columns, costs)),
        samples=seconds,
    )


def _best(of: Mapping[str, Samples]) -> str:
    """The fastest of the peers."""
    return min(of.keys() - {OURS, OURS_WORKERS}, key=lambda name: typical(of[name]))


def _round(servers: Sequence[Contender], found: dict[int, list[Round]], effort: Effort) -> None:
    request = wire.infer_request("mlp", models.mlp_feeds(rows=1))
    with ExitStack() as stack:
        running = {each.name: stack.enter_context(each.start()) for each in servers}
        clients = {name: stack.enter_context(Client(server.port, request)) for name, server in running.items()}
        for client in clients.values():
            client.load(_CONNECTIONS, _WARM_UP_S, _CONNECTIONS)

        def turn(name: str, number: int) -> Turn:
            before = running[name].cpu_seconds()
            load = clients[name].load(number, effort.seconds, min(number, _CONNECTIONS))
            used = running[name].cpu_seconds() - before
            return {_TIME: load.seconds / load.calls, _BUSY: used / load.calls}

        for number, rounds in found.items():
            rounds.append(take_turns({name: partial(turn, name, number) for name in running}, effort.turns))
