"""MiniLM asked for sentences of 4 to 64 tokens, open loop, at 70 % of the rate that the server can take.

Requests of different lengths share no batch, and a long one takes several times as long as a short one: how much later
than half of the others is the slowest hundredth answered?
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.core import models
from bench.core.processes import Server, bf16_serve
from bench.core.results import Measurement, Result
from bench.core.verdict import estimate
from bench.core.workspace import Workspace
from bench.serving import wire
from bench.serving.openloop import Offering, Outcome

_AT_MOST = 2.0
_LENGTHS = range(4, 65, 4)
_SHARE = 0.7
_ROUNDS, _TURNS, _SECONDS = 5, 2, 6.0
_PROBE_S = 3.0
_STEPS = 5  # halvings of the interval in which the peak is looked for
_KEPT_UP_S = 0.5  # p99 of a server that keeps up
_CONNECTIONS = 4


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """p99 over p50 of the answered requests: with the defaults, which are judged, and with other layouts."""
    rounds, turns, seconds = (1, 1, 2.0) if quick else (_ROUNDS, _TURNS, _SECONDS)
    cores = len(os.sched_getaffinity(0))
    layouts = {
        "defaults": "",
        "an instance for each core": f"instances: {cores}\nthreads: 1\n",
        "instances: auto": "instances: auto\n",
    }
    messages = [wire.infer_request("minilm", models.minilm_feeds(1, tokens)) for tokens in _LENGTHS]
    messages = [messages[at] for at in np.random.default_rng(0).permutation(len(messages))]
    log = workspace.root / "latency_mixed.log"
    measurements: list[Measurement] = []
    for name, serving in layouts.items():
        repository = workspace.repository("latency_mixed", workspace.minilm(), serving)
        with bf16_serve(repository, log) as server:
            peak = _peak(server, messages)
        found = [_round(repository, log, messages, _SHARE * peak, turns, seconds) for _ in range(rounds)]
        measurements += _measurements(name, peak, found, _AT_MOST if not serving else None)
    return Result(
        "latency_mixed",
        tuple(measurements),
        settings={
            "model": "all-MiniLM-L6-v2, one row of 4, 8, … 64 tokens",
            "rounds": rounds,
            "turns": turns,
            "seconds": seconds,
            "connections": _CONNECTIONS,
            "serving": layouts,
            "offered": f"{_SHARE} of each layout's own peak",
        },
        notes=("the time of a request counts from when it was due", "arrivals are evenly spaced"),
    )


def _measurements(
    name: str, peak: float, found: Sequence[Sequence[Outcome]], at_most: float | None
) -> list[Measurement]:
    ratios = estimate([np.array([_p(of, 0.99) / _p(of, 0.5) for of in outcomes]) for outcomes in found])
    every = [outcome for outcomes in found for outcome in outcomes]
    answered = sum(len(of.answered) for of in every) / sum(of.offered for of in every)
    return [
        Measurement.of(f"{name}: p99 over p50", ratios, at_most=at_most),
        Measurement(f"{name}: p50", float(np.median([_p(of, 0.5) for of in every])) * 1e3, "ms"),
        Measurement(f"{name}: p99", float(np.median([_p(of, 0.99) for of in every])) * 1e3, "ms"),
        Measurement(f"{name}: peak", peak, "requests/s"),
        Measurement(f"{name}: answered", 100 * answered, "%"),
    ]


def _round(
    repository: Path, log: Path, messages: list[bytes], rate: float, turns: int, seconds: float
) -> list[Outcome]:
    with bf16_serve(repository, log) as server:
        _offer(server, messages, rate, 1.0)
        return [_offer(server, messages, rate, seconds) for _ in range(turns)]


def _peak(server: Server, messages: list[bytes]) -> float:
    """The highest rate, within a few percent, that the server keeps up with."""
    low, high = 20.0, 20.0
    while _keeps_up(server, messages, high):
        low, high = high, 2 * high
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if _keeps_up(server, messages, middle) else (low, middle)
    return low


def _keeps_up(server: Server, messages: list[bytes], rate: float) -> bool:
    found = _offer(server, messages, rate, _PROBE_S)
    return len(found.answered) == found.offered and _p(found, 0.99) < _KEPT_UP_S


def _offer(server: Server, messages: list[bytes], rate: float, seconds: float) -> Outcome:
    return Offering(server.port, messages, rate=rate, seconds=seconds, connections=_CONNECTIONS).outcome()


def _p(found: Outcome, share: float) -> float:
    """Of the answered ones, in seconds."""
    return found.percentile("answered", share)
