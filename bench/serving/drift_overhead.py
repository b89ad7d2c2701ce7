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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

from bench.core import models
from bench.core.processes import Server, bf16_serve, drift_samples
from bench.core.results import Grid, Measurement, Result
from bench.core.rounds import Effort, Round, Turn, samples, take_turns
from bench.core.verdict import FEWEST_PROCESSES, ratio, typical
from bench.core.workspace import Workspace
from bench.serving import wire
from bench.serving.client import Client

OFF, DEFAULTS, TENTH = "off", "defaults", "tenth"
_SHADOWS = {
    OFF: "shadow: {rate: 0}\n",
    DEFAULTS: "",
    TENTH: "shadow: {rate: 0.1, max_per_second: 10000}\n",
}
_TIME, _P99, _BUSY = "time per request", "p99", "server's processor time per request"
# Over those without a shadow.
_GOALS = {DEFAULTS: {_TIME: 1.01, _P99: 1.02, _BUSY: 1.01}, TENTH: {_TIME: 1.05, _P99: 1.05, _BUSY: 1.05}}
_IN_FLIGHT = (16, 1)
_READY_S = 60.0
# Each side is as often first, second and last. As much again as a quarter of a turn goes before, and is not measured.
_FULL, _QUICK = Effort(FEWEST_PROCESSES, 6, 0.6), Effort(1, 2, 0.4)
_STILL_S, _SETTLED_S = 0.06, 3.0  # the server idle for so long has nothing left to measure; waited for at most
_OUTCOMES = ("measured", "dropped")
_COLUMNS = tuple(f"{side}: {what}" for side in _GOALS for what in _OUTCOMES)


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """How many times as long a request takes, and p99 is, with each shadow as with none."""
    effort = _QUICK if quick else _FULL
    cases = {
        "MiniLM": (workspace.minilm(), models.minilm_feeds(1)),
        "MLP": (workspace.mlp(), models.mlp_feeds(rows=1)),
    }
    found: dict[str, list[Round]] = {}
    shares: dict[str, list[float]] = {}
    for name, (artifact, feeds) in cases.items():
        repository = _repository(workspace, artifact)
        requests = {side: wire.infer_request(side, feeds) for side in _SHADOWS}
        labels = {f"{name}, {number} in flight": number for number in _IN_FLIGHT}
        found |= {label: [] for label in labels}
        outcomes = [_round(repository, workspace.root, requests, labels, found, effort) for _ in range(effort.rounds)]
        shares[name] = [100 * median(each[column] for each in outcomes) for column in _COLUMNS]

    def grid(title: str, unit: str, what: str, cell: Callable[[float], float]) -> Grid:
        rows = {label: [cell(typical(of)) for of in samples(rounds, what).values()] for label, rounds in found.items()}
        return Grid(title, unit, tuple(_SHADOWS), rows)

    return Result(
        "drift_overhead",
        tuple(each for label, rounds in found.items() for each in _judged(label, rounds)),
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
            grid("requests per second", "1/s", _TIME, lambda seconds: 1 / seconds),
            grid(_P99, "ms", _P99, lambda seconds: 1e3 * seconds),
            grid(_BUSY, "µs", _BUSY, lambda seconds: 1e6 * seconds),
            Grid("rows, in percent of requests", "", _COLUMNS, shares),
        ),
    )


def _judged(label: str, rounds: Sequence[Round]) -> Iterator[Measurement]:
    detail = "over that without a shadow, in the same turn"
    for side, goals in _GOALS.items():
        for what, at_most in goals.items():
            of = samples(rounds, what)
            yield Measurement.of(f"{label}: {what}, {side}", ratio(of[side], of[OFF]), at_most=at_most, detail=detail)


def _round(
    repository: Path,
    root: Path,
    requests: Mapping[str, bytes],
    labels: Mapping[str, int],
    found: Mapping[str, list[Round]],
    effort: Effort,
) -> dict[str, float]:
    """Adds what was found; what became of samples, in rows per request, by side and outcome."""
    with ExitStack() as stack:
        server = stack.enter_context(bf16_serve(repository, root / "drift_overhead.log"))
        clients = {side: stack.enter_context(Client(server.port, request)) for side, request in requests.items()}
        _wait_for_references(server, clients)
        before, calls = drift_samples(server), dict.fromkeys(clients, 0)

        def turn(side: str, number: int) -> Turn:
            warm = clients[side].load(number, effort.seconds / 4)
            busy = server.own_cpu_seconds()
            load = clients[side].load(number, effort.seconds)
            _settle(server)
            calls[side] += warm.calls + load.calls
            return {_TIME: 1 / load.rate, _P99: load.p99, _BUSY: (server.own_cpu_seconds() - busy) / load.calls}

        for label, number in labels.items():
            found[label].append(take_turns({side: partial(turn, side, number) for side in clients}, effort.turns))
        after = drift_samples(server)
        return {
            f"{side}: {what}": (after.get((side, what), 0.0) - before.get((side, what), 0.0)) / calls[side]
            for side in _GOALS
            for what in _OUTCOMES
        }


def _wait_for_references(server: Server, clients: Mapping[str, Client]) -> None:
    """They are loaded when a sample was measured; at the defaults that takes a while."""
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline:
        for client in clients.values():
            client.load(4, 0.3)
        found = drift_samples(server)
        if all(found.get((side, "measured"), 0) > 0 for side in _GOALS):
            return
    raise RuntimeError(f"no live drift was measured within {_READY_S:g} s: {found}")


def _settle(server: Server) -> None:
    """What waits to be measured is part of no other side's turn."""
    deadline = time.monotonic() + _SETTLED_S
    while time.monotonic() < deadline:
        before = server.cpu_seconds()
        time.sleep(_STILL_S)
        if server.cpu_seconds() - before < _STILL_S / 4:
            return


def _repository(workspace: Workspace, artifact: Path) -> Path:
    """The artifact as three models, one for each shadow."""
    repository = workspace.repository("drift_overhead", artifact)
    served = repository / artifact.parent.name
    for side, shadow in _SHADOWS.items():
        shutil.copytree(served / artifact.name, repository / side / artifact.name)
        (repository / side / "serving.yaml").write_text(shadow, "utf-8")
    shutil.rmtree(served)
    return repository
