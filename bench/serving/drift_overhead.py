"""What live drift costs those who ask: throughput and p99 with the shadow off, at its defaults, and at a tenth.

One server has the same artifact three times, each with its own ``shadow``, and clients ask one after the other.
Threads, memory and neighbours are then the same for all, and a percent can be seen: between two processes they differ
by more. Servers are fresh in each round, and a round is one observation. The reference's process shares the cores with
the server and the clients, as it does in a deployment that has no core to spare. What sampling costs where the
reference has a core of its own is the processor time that the server's process, without the reference's, spends on a
request.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from statistics import median

import numpy as np

from bench.core import models
from bench.core.grid import Grid
from bench.core.processes import Server, bf16_serve, drift_samples
from bench.core.results import Measurement, Result
from bench.core.verdict import estimate
from bench.core.workspace import Workspace
from bench.serving import wire
from bench.serving.client import Client, Load

OFF, DEFAULTS, TENTH = "off", "defaults", "tenth"
_SHADOWS = {
    OFF: "shadow: {rate: 0}\n",
    DEFAULTS: "",
    TENTH: "shadow: {rate: 0.1, max_per_second: 10000}\n",
}
# Over those without a shadow, in the order of _WHAT.
_GOALS = {DEFAULTS: (1.01, 1.02, 1.01), TENTH: (1.05, 1.05, 1.05)}
_IN_FLIGHT = (16, 1)
_READY_S = 60.0


@dataclass(frozen=True, slots=True)
class _Effort:
    rounds: int
    turns: int
    seconds: float  # of each turn; as much again as a quarter of it goes before and is not measured


_FULL, _QUICK = _Effort(5, 6, 0.6), _Effort(1, 2, 0.4)
_STILL_S, _SETTLED_S = 0.06, 3.0  # the server idle for so long has nothing left to measure; waited for at most


@dataclass(frozen=True, slots=True)
class _Turn:
    """Requests of one side, and the processor time that the server's own process took for them, in seconds."""

    load: Load
    busy: float


_WHAT: Mapping[str, Callable[[_Turn], float]] = {
    "time per request": lambda turn: 1 / turn.load.rate,
    "p99": lambda turn: turn.load.p99,
    "server's processor time per request": lambda turn: turn.busy / turn.load.calls,
}


@dataclass(slots=True)
class _Found:
    """Of one model and number in flight: turns by side, by round."""

    turns: dict[str, list[list[_Turn]]] = field(default_factory=lambda: {side: [] for side in _SHADOWS})

    def typical(self, what: str) -> list[float]:
        """The median of all turns, by side."""
        return [median(_WHAT[what](turn) for turns in self.turns[side] for turn in turns) for side in _SHADOWS]


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """How many times as long a request takes, and p99 is, with each shadow as with none."""
    effort = _QUICK if quick else _FULL
    cases = {
        "MiniLM": (workspace.minilm(), models.minilm_feeds(1)),
        "MLP": (workspace.mlp(), models.mlp_feeds(rows=1)),
    }
    measurements: list[Measurement] = []
    rates: dict[str, list[float]] = {}
    late: dict[str, list[float]] = {}
    busy: dict[str, list[float]] = {}
    shares: dict[str, list[float]] = {}
    for name, (artifact, feeds) in cases.items():
        repository = _repository(workspace, artifact)
        requests = {side: wire.infer_request(side, feeds) for side in _SHADOWS}
        found = {number: _Found() for number in _IN_FLIGHT}
        samples = [_round(repository, workspace.root, requests, found, effort) for _ in range(effort.rounds)]
        for number, of in found.items():
            label = f"{name}, {number} in flight"
            measurements += _judged(label, of)
            rates[label] = [1 / seconds for seconds in of.typical("time per request")]
            late[label] = [1e3 * seconds for seconds in of.typical("p99")]
            busy[label] = [1e6 * seconds for seconds in of.typical("server's processor time per request")]
        shares[name] = _shares(samples)
    return Result(
        "drift_overhead",
        tuple(measurements),
        settings={
            "shadow": {side: text.strip() or "defaults" for side, text in _SHADOWS.items()},
            "rounds": effort.rounds,
            "turns": effort.turns,
            "seconds_per_turn": effort.seconds,
            "request": "one row; MiniLM's of 16 tokens; one connection",
        },
        notes=(
            "one server serves the artifact three times; turns go round, in each of the six orders",
            "clients, server and the reference's process share the cores",
        ),
        grids=(
            Grid("requests per second", "1/s", tuple(_SHADOWS), rates),
            Grid("p99", "ms", tuple(_SHADOWS), late),
            Grid("server's processor time per request", "µs", tuple(_SHADOWS), busy),
            Grid("rows, in percent of requests", "", _COLUMNS, shares),
        ),
    )


_COLUMNS = tuple(f"{side}: {what}" for side in (DEFAULTS, TENTH) for what in ("measured", "dropped"))


def _judged(label: str, found: _Found) -> list[Measurement]:
    measurements = []
    for side, goals in _GOALS.items():
        for (what, value), goal in zip(_WHAT.items(), goals, strict=True):
            ratios = [
                np.array([value(turn) / value(base) for turn, base in zip(turns, bases, strict=True)])
                for turns, bases in zip(found.turns[side], found.turns[OFF], strict=True)
            ]
            detail = "over that without a shadow, in the same turn"
            measurements.append(
                Measurement.of(f"{label}: {what}, {side}", estimate(ratios), at_most=goal, detail=detail)
            )
    return measurements


def _round(
    repository: Path, root: Path, requests: Mapping[str, bytes], found: Mapping[int, _Found], effort: _Effort
) -> dict[tuple[str, str], float]:
    """Adds what was found; what became of samples, in rows per request, by side and outcome."""
    with ExitStack() as stack:
        server = stack.enter_context(bf16_serve(repository, root / "drift_overhead.log"))
        clients = {side: stack.enter_context(Client(server.port, request)) for side, request in requests.items()}
        _wait_for_references(server, clients)
        before, calls = drift_samples(server), dict.fromkeys(clients, 0)
        orders = list(permutations(clients))  # each side is as often first, second and last
        for number, into in found.items():
            turns: dict[str, list[_Turn]] = {side: [] for side in clients}
            for turn in range(effort.turns):
                for side in orders[turn % len(orders)]:
                    warm = clients[side].load(number, effort.seconds / 4)
                    busy = server.own_cpu_seconds()
                    load = clients[side].load(number, effort.seconds)
                    _settle(server)
                    turns[side].append(_Turn(load, server.own_cpu_seconds() - busy))
                    calls[side] += warm.calls + load.calls
            for side, taken in turns.items():
                into.turns[side].append(taken)
        after = drift_samples(server)
        return {
            (side, outcome): (count - before.get((side, outcome), 0)) / calls[side]
            for (side, outcome), count in after.items()
        }


def _wait_for_references(server: Server, clients: Mapping[str, Client]) -> None:
    """They are loaded when a sample was measured; at the defaults that takes a while."""
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline:
        for client in clients.values():
            client.load(4, 0.3)
        samples = drift_samples(server)
        if all(samples.get((side, "measured"), 0) > 0 for side in (DEFAULTS, TENTH)):
            return
    raise RuntimeError(f"no live drift was measured within {_READY_S:g} s: {samples}")


def _settle(server: Server) -> None:
    """What waits to be measured is part of no other side's turn."""
    deadline = time.monotonic() + _SETTLED_S
    while time.monotonic() < deadline:
        before = server.cpu_seconds()
        time.sleep(_STILL_S)
        if server.cpu_seconds() - before < _STILL_S / 4:
            return


def _shares(rounds: Sequence[Mapping[tuple[str, str], float]]) -> list[float]:
    return [
        100 * median(each.get((side, what), 0.0) for each in rounds)
        for side in (DEFAULTS, TENTH)
        for what in ("measured", "dropped")
    ]


def _repository(workspace: Workspace, artifact: Path) -> Path:
    """The artifact as three models, one for each shadow."""
    repository = workspace.repository("drift_overhead", artifact)
    served = repository / artifact.parent.name
    for side, shadow in _SHADOWS.items():
        shutil.copytree(served / artifact.name, repository / side / artifact.name)
        (repository / side / "serving.yaml").write_text(shadow, "utf-8")
    shutil.rmtree(served)
    return repository
