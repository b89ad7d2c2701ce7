"""What clients see when ten times as much is asked as the server can do: who is answered, how soon; who is refused, how
soon. An open loop over 16 connections, from another process on the same machine.

Capacity is what a closed loop reaches. The first block offers 80 % of it, the second ten times as much, against one
fresh server per round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from bench.core import models
from bench.core.processes import Server, bf16_serve
from bench.core.results import Measurement, Result
from bench.core.verdict import Estimate, estimate
from bench.core.workspace import Workspace
from bench.serving import wire
from bench.serving.client import Client
from bench.serving.generator import NOT_SENT
from bench.serving.openloop import Outcome, offer

_ROUNDS, _SECONDS, _CAPACITY_SECONDS = 5, 6.0, 3.0
_QUICK = 1, 2.0, 1.0
_IN_FLIGHT = 16
_MS = 1e3
_GOODPUT = 0.6
_TIMES_SLOWER, _REFUSED_P50_MS, _REFUSED_P99_MS = 3.0, 5.0, 25.0


@dataclass(frozen=True)
class _Round:
    capacity: float
    calm: Outcome
    storm: Outcome
    cpu_us: float  # of the server, per call answered in the closed loop


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """For the MLP and for MiniLM: times of the answered and of the refused."""
    rounds, seconds, capacity_seconds = _QUICK if quick else (_ROUNDS, _SECONDS, _CAPACITY_SECONDS)
    mlp = workspace.repository("overload_mlp", workspace.mlp())
    minilm = workspace.repository("overload_minilm", workspace.minilm())
    subjects = (
        ("MLP", mlp, wire.infer_request("mlp", models.mlp_feeds(rows=1))),
        ("MiniLM", minilm, wire.infer_request("minilm", models.minilm_feeds(1))),
    )
    found: list[Measurement] = []
    for name, repository, request in subjects:
        log = workspace.root / f"overload_{name}.log"
        done = [_round(repository, log, request, seconds, capacity_seconds) for _ in range(rounds)]
        found += _measurements(name, done)
    return Result(
        "overload",
        tuple(found),
        settings={"rounds": rounds, "seconds": seconds, "connections": 16, "serving": "defaults"},
        notes=(
            "times count from when a call was due, the generator's own delay included, unless a row says otherwise",
            "a call waits in the client while its connection has as many open as the server allows; after a second it"
            " is given up, and counts as not sent",
            "medians over rounds, each with a server of its own",
        ),
    )


def _round(repository: Path, log: Path, request: bytes, seconds: float, capacity_seconds: float) -> _Round:
    with bf16_serve(repository, log) as server, Client(server.port, request) as client:
        client.load(_IN_FLIGHT, capacity_seconds / 2)
        before = server.cpu_seconds()
        load = client.load(_IN_FLIGHT, capacity_seconds)
        cpu_us = (server.cpu_seconds() - before) / load.calls * 1e6
        calm = _offer(server, request, 0.8 * load.rate, seconds)
        return _Round(load.rate, calm, _offer(server, request, 10 * load.rate, seconds), cpu_us)


def _offer(server: Server, request: bytes, rate: float, seconds: float) -> Outcome:
    return offer(server.port, request, rate=rate, seconds=seconds)


def _measurements(name: str, rounds: list[_Round]) -> list[Measurement]:
    def middle(value: Callable[[_Round], float]) -> float:
        return median(map(value, rounds))

    def paired(value: Callable[[_Round], float]) -> Estimate:
        """Of each server by itself."""
        return estimate([np.array([value(one)]) for one in rounds])

    def over(of: str, share: float, *, storm: bool) -> float:
        return middle(lambda one: (one.storm if storm else one.calm).percentile(of, share)) * _MS

    refusing = [one.storm for one in rounds if one.storm.refused]  # the others have no such time
    refused = [
        Measurement(
            f"{name}: refused {what}", _MS * median(r.percentile("refused", at) for r in refusing), "ms", at_most=most
        )
        for what, at, most in (("p50", 0.5, _REFUSED_P50_MS), ("p99", 0.99, _REFUSED_P99_MS))
        if refusing
    ]
    slower = paired(lambda one: one.storm.percentile("served", 0.99) / one.calm.percentile("answered", 0.99))
    # Offered was ten times the capacity: so many seconds were calls answered in.
    answered = paired(lambda one: 10 * len(one.storm.answered) / one.storm.offered)
    not_sent = middle(lambda one: one.storm.counts.get(NOT_SENT, 0) / one.storm.offered)
    return [
        Measurement(f"{name}: capacity in a closed loop", middle(lambda one: one.capacity), "calls/s"),
        Measurement(f"{name}: server's processor time per call", middle(lambda one: one.cpu_us), "µs"),
        Measurement(f"{name}: p50 at 80 %", over("answered", 0.5, storm=False), "ms"),
        Measurement(f"{name}: p99 at 80 %", over("answered", 0.99, storm=False), "ms"),
        Measurement(f"{name}: offered 10 ×, answered p50 from when due", over("answered", 0.5, storm=True), "ms"),
        Measurement(f"{name}: offered 10 ×, answered p50 from when sent", over("served", 0.5, storm=True), "ms"),
        Measurement(f"{name}: offered 10 ×, answered p99 from when sent", over("served", 0.99, storm=True), "ms"),
        Measurement.of(f"{name}: p99 of the answered, from when sent, ÷ p99 at 80 %", slower, at_most=_TIMES_SLOWER),
        *refused,
        Measurement.of(f"{name}: answered under 10 × ÷ capacity", answered, at_least=_GOODPUT),
        Measurement(f"{name}: not sent within a second, ÷ offered", not_sent),
        Measurement(f"{name}: neither answered nor refused", float(sum(r.storm.lost for r in rounds)), at_most=0),
    ]
