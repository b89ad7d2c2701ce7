"""What clients see when ten times as much is asked as the server can do: who is answered, how soon; who is refused, how
soon. An open loop over 16 connections, from another process on the same machine.

Capacity is what a closed loop reaches. The first block offers 80 % of it, the second ten times as much, against one
fresh server per round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from bench.core import models
from bench.core.processes import bf16_serve
from bench.core.results import Measurement, Result
from bench.core.verdict import FEWEST_PROCESSES, Estimate, estimate
from bench.core.workspace import Workspace
from bench.serving import wire
from bench.serving.client import Client
from bench.serving.http2 import NOT_SENT
from bench.serving.openloop import Offering, Outcome

_ROUNDS, _SECONDS, _CAPACITY_SECONDS = FEWEST_PROCESSES, 6.0, 3.0
_QUICK = 1, 2.0, 1.0
_IN_FLIGHT = _CONNECTIONS = 16
_MS = 1e3
_GOODPUT = 0.6
_TIMES_SLOWER = 3.0
_REFUSED_MS = (("p50", 0.5, 5.0), ("p99", 0.99, 25.0))


@dataclass(frozen=True)
class _Round:
    capacity: float
    calm: Outcome
    storm: Outcome
    cpu_us: float  # of the server, per call answered in the closed loop


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """For the MLP and for MiniLM: times of the answered and of the refused."""
    rounds, seconds, capacity_seconds = _QUICK if quick else (_ROUNDS, _SECONDS, _CAPACITY_SECONDS)
    subjects = (
        ("MLP", workspace.mlp(), wire.infer_request("mlp", models.mlp_feeds(rows=1))),
        ("MiniLM", workspace.minilm(), wire.infer_request("minilm", models.minilm_feeds(1))),
    )
    found: list[Measurement] = []
    for name, artifact, request in subjects:
        repository = workspace.repository(f"overload_{name}", artifact)
        log = workspace.root / f"overload_{name}.log"
        done = [_round(repository, log, request, seconds, capacity_seconds) for _ in range(rounds)]
        found += _measurements(name, done)
    return Result(
        "overload",
        tuple(found),
        settings={"rounds": rounds, "seconds": seconds, "connections": _CONNECTIONS, "serving": "defaults"},
        notes=(
            "times count from when a call was due, the generator's own delay included, unless a row says otherwise",
            "a call waits in the client while its connection has as many open as the server allows; after a second it"
            " is given up, and counts as not sent",
            "medians over rounds, each with a server of its own",
        ),
    )


def _round(repository: Path, log: Path, request: bytes, seconds: float, capacity_seconds: float) -> _Round:
    with bf16_serve(repository, log) as server, Client(server.port, request) as client:

        def offered(rate: float) -> Outcome:
            return Offering(server.port, [request], rate=rate, seconds=seconds, connections=_CONNECTIONS).outcome()

        client.load(_IN_FLIGHT, capacity_seconds / 2)
        before = server.cpu_seconds()
        load = client.load(_IN_FLIGHT, capacity_seconds)
        cpu_us = (server.cpu_seconds() - before) / load.calls * 1e6
        return _Round(load.rate, offered(0.8 * load.rate), offered(10 * load.rate), cpu_us)


def _measurements(name: str, rounds: list[_Round]) -> Iterator[Measurement]:
    def middle(what: str, value: Callable[[_Round], float], unit: str = "", scale: float = 1.0) -> Measurement:
        return Measurement(f"{name}: {what}", scale * median(map(value, rounds)), unit)

    def paired(value: Callable[[_Round], float]) -> Estimate:
        """Of each server by itself."""
        return estimate([np.array([value(one)]) for one in rounds])

    yield middle("capacity in a closed loop", lambda one: one.capacity, "calls/s")
    yield middle("server's processor time per call", lambda one: one.cpu_us, "µs")
    yield middle("p50 at 80 %", lambda one: one.calm.percentile("answered", 0.5), "ms", _MS)
    yield middle("p99 at 80 %", lambda one: one.calm.percentile("answered", 0.99), "ms", _MS)
    storm = "offered 10 ×, answered"
    yield middle(f"{storm} p50 from when due", lambda one: one.storm.percentile("answered", 0.5), "ms", _MS)
    yield middle(f"{storm} p50 from when sent", lambda one: one.storm.percentile("served", 0.5), "ms", _MS)
    yield middle(f"{storm} p99 from when sent", lambda one: one.storm.percentile("served", 0.99), "ms", _MS)
    slower = paired(lambda one: one.storm.percentile("served", 0.99) / one.calm.percentile("answered", 0.99))
    yield Measurement.of(f"{name}: p99 of the answered, from when sent, ÷ p99 at 80 %", slower, at_most=_TIMES_SLOWER)
    if refusing := [one.storm for one in rounds if one.storm.refused]:  # the others have no such time
        for what, share, most in _REFUSED_MS:
            took = _MS * median(one.percentile("refused", share) for one in refusing)
            yield Measurement(f"{name}: refused {what}", took, "ms", at_most=most)
    # Offered was ten times the capacity: so many seconds were calls answered in.
    answered = paired(lambda one: 10 * len(one.storm.answered) / one.storm.offered)
    yield Measurement.of(f"{name}: answered under 10 × ÷ capacity", answered, at_least=_GOODPUT)
    yield middle(
        "not sent within a second, ÷ offered", lambda one: one.storm.counts.get(NOT_SENT, 0) / one.storm.offered
    )
    yield Measurement(f"{name}: neither answered nor refused", float(sum(r.storm.lost for r in rounds)), at_most=0)
