"""Requests per second and processor time per request, of several servers in turns; fresh processes in each round."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median

from bench.core.grid import Grid
from bench.core.processes import Server
from bench.core.results import Measurement, Result
from bench.core.verdict import ratio, typical
from bench.peers.contenders import OURS, OURS_WORKERS, Contender
from bench.serving.client import Client, Transport

_WARM_UP_S = 0.5
_CONNECTIONS = 16  # at most: each belongs to one of a server's processes, and chance decides which


@dataclass(frozen=True, slots=True)
class Effort:
    """``rounds`` of fresh processes; in each, ``turns`` of ``seconds`` for every server and number in flight."""

    rounds: int
    turns: int
    seconds: float


FULL, QUICK = Effort(5, 3, 1.5), Effort(1, 1, 0.5)


@dataclass(slots=True)
class Found:
    """By contender: seconds per request by round and turn, and processor microseconds per request of every turn."""

    seconds: dict[str, list[list[list[float]]]] = field(default_factory=dict)
    cpu_us: dict[str, list[float]] = field(default_factory=dict)


def compare(
    name: str,
    servers: Sequence[Contender],
    request: bytes,
    in_flight: Sequence[int],
    *,
    goal: float,
    against: str,
    effort: Effort,
    transport: Transport = "http2",
    settings: Mapping[str, object],
) -> Result:
    """A goal for each number in flight: our rate is at least ``goal`` times that of the best peer.

    ``against`` is what the names of the peers that count begin with; empty: all do.
    """
    found = measured(servers, {server.name: request for server in servers}, in_flight, effort, transport)
    peers = [server.name for server in servers if server.name.startswith(against) and "bf16" not in server.name]
    measurements = [entry for number in in_flight for entry in _judged(number, found[number], peers, goal)]
    not_defaults = {server.name: server.settings for server in servers if server.settings}
    columns = [server.name for server in servers]
    return described(name, columns, in_words(found), measurements, effort, {**settings, "not_defaults": not_defaults})


def measured(
    servers: Sequence[Contender],
    requests: Mapping[str, bytes],
    in_flight: Sequence[int],
    effort: Effort,
    transport: Transport,
) -> dict[int, Found]:
    """What was found for each number of requests in flight; ``requests`` are by the contenders' names."""
    found = {number: Found() for number in in_flight}
    for _ in range(effort.rounds):
        _round(servers, requests, found, effort, transport)
    return found


def described(
    name: str,
    columns: Sequence[str],
    found: Mapping[str, Found],
    measurements: Sequence[Measurement],
    effort: Effort,
    settings: Mapping[str, object],
) -> Result:
    """``measurements`` with the rates and the processor time that they come from; ``columns`` are the servers' names,
    ``found`` is by what was done."""
    rates = {what: [1 / typical(of.seconds[c]) for c in columns] for what, of in found.items()}
    costs = {what: [median(of.cpu_us[c]) for c in columns] for what, of in found.items()}
    return Result(
        name,
        tuple(measurements),
        settings={
            **settings,
            "rounds": effort.rounds,
            "turns": effort.turns,
            "seconds_per_turn": effort.seconds,
            "connections": f"one for each request in flight, {_CONNECTIONS} at most",
            "cores": len(os.sched_getaffinity(0)),
        },
        notes=(
            "clients and servers share the cores; the client is a process of its own",
            "processor time is user and system time of a server's processes, per request",
        ),
        grids=(
            Grid("requests per second", "1/s", columns, rates),
            Grid("processor time per request", "µs", columns, costs),
        ),
        samples={what: of.seconds for what, of in found.items()},
    )


def in_words(found: Mapping[int, Found]) -> dict[str, Found]:
    """What was found, by the number of requests in flight in words."""
    return {f"{number} in flight": of for number, of in found.items()}


def _round(
    servers: Sequence[Contender],
    requests: Mapping[str, bytes],
    found: Mapping[int, Found],
    effort: Effort,
    transport: Transport,
) -> None:
    with ExitStack() as stack:
        running = {each.name: stack.enter_context(each.start()) for each in servers}
        clients = {name: stack.enter_context(Client(server.port, requests[name])) for name, server in running.items()}
        for client in clients.values():
            client.load(_CONNECTIONS, _WARM_UP_S, transport, _CONNECTIONS)
        for number, into in found.items():
            turns: dict[str, list[list[float]]] = {name: [] for name in running}
            for turn in range(effort.turns):
                for name in list(running)[:: 1 if turn % 2 == 0 else -1]:
                    seconds, cpu = _turn(running[name], clients[name], number, effort.seconds, transport)
                    turns[name].append([seconds])
                    into.cpu_us.setdefault(name, []).append(cpu)
            for name, taken in turns.items():
                into.seconds.setdefault(name, []).append(taken)


def _turn(server: Server, client: Client, number: int, seconds: float, transport: Transport) -> tuple[float, float]:
    """Seconds and processor microseconds per request."""
    before = server.cpu_seconds()
    load = client.load(number, seconds, transport, min(number, _CONNECTIONS))
    return load.seconds / load.calls, (server.cpu_seconds() - before) / load.calls * 1e6


def _judged(number: int, found: Found, peers: Sequence[str], goal: float) -> list[Measurement]:
    best = min(peers, key=lambda name: typical(found.seconds[name]))
    return [
        Measurement.of(
            f"{number} in flight: {ours} against {best}",
            ratio(found.seconds[best], found.seconds[ours]),
            at_least=goal,
            detail="requests per second, ours over theirs",
        )
        for ours in (OURS, OURS_WORKERS)
        if ours in found.seconds
    ]
