"""MiniLM asked for sentences of 4 to 64 tokens, open loop, at 70 % of the rate that the server can take.

Requests of different lengths share no batch, and a long one takes several times as long as a short one: how much later
than half of the others is the slowest hundredth answered? Asked evenly spaced, which the goal is held against, and at
random, as many users are: then no order of answers reaches the goal (docs/decisions/0061). A layout with a higher peak
is offered more; so each also gets what 70 % of the lowest peak is.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

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
_ROUNDS, _SECONDS = 5, 5.0
_PROBE_S = 3.0
_STEPS = 5  # halvings of the interval in which the peak is looked for
_KEPT_UP_S = 0.5  # p99 of a server that keeps up
_CONNECTIONS = 4


@dataclass(frozen=True, slots=True)
class _Offer:
    """One way to ask; ``own``: the rate is a share of the layout's own peak, not of the lowest."""

    name: str
    own: bool
    random: bool


_OFFERS = (
    _Offer("", True, False),
    _Offer("at random, ", True, True),
    _Offer("at random, same rate for all, ", False, True),
)


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """p99 over p50 of the answered requests: with the defaults, which are judged, and with other layouts."""
    rounds, seconds = (1, 2.0) if quick else (_ROUNDS, _SECONDS)
    cores = len(os.sched_getaffinity(0))
    layouts = {
        "defaults": "",
        "an instance for each core": f"instances: {cores}\n",
    }
    messages = [wire.infer_request("minilm", models.minilm_feeds(1, tokens)) for tokens in _LENGTHS]
    messages = [messages[at] for at in np.random.default_rng(0).permutation(len(messages))]
    repositories = {
        name: workspace.repository(f"latency_mixed_{at}", workspace.minilm(), serving)
        for at, (name, serving) in enumerate(layouts.items())
    }
    log = workspace.root / "latency_mixed.log"
    peaks: dict[str, float] = {}
    for name, repository in repositories.items():
        with bf16_serve(repository, log) as server:
            peaks[name] = _peak(server, messages)
    found: dict[tuple[str, _Offer], list[Outcome]] = {(name, offer): [] for name in layouts for offer in _OFFERS}
    for number in range(rounds):
        for name in layouts if number % 2 == 0 else reversed(layouts):
            with bf16_serve(repositories[name], log) as server:
                _offer(server, messages, _SHARE * min(peaks.values()), 1.0)
                for offer in _OFFERS:
                    rate = _SHARE * (peaks[name] if offer.own else min(peaks.values()))
                    seed = number if offer.random else None
                    found[name, offer].append(_offer(server, messages, rate, seconds, seed))
    return Result(
        "latency_mixed",
        tuple(each for name in layouts for each in _measurements(name, peaks[name], found, not layouts[name])),
        settings={
            "model": "all-MiniLM-L6-v2, one row of 4, 8, … 64 tokens",
            "rounds": rounds,
            "seconds": seconds,
            "connections": _CONNECTIONS,
            "serving": layouts,
            "offered": f"{_SHARE} of each layout's own peak, or of the lowest",
        },
        notes=(
            "the time of a request counts from when it was due",
            "arrivals are evenly spaced; at random: a Poisson process, the same calls where the rate is the same",
        ),
    )


def _measurements(
    name: str, peak: float, found: dict[tuple[str, _Offer], list[Outcome]], judged: bool
) -> list[Measurement]:
    """Of one layout. Only the defaults are judged, asked as the goal says."""
    measurements = [Measurement(f"{name}: peak", peak, "requests/s")]
    for offer in _OFFERS:
        outcomes = found[name, offer]
        ratios = estimate([np.array([_p(of, 0.99) / _p(of, 0.5)]) for of in outcomes])
        answered = sum(len(of.answered) for of in outcomes) / sum(of.offered for of in outcomes)
        at_most = _AT_MOST if judged and offer is _OFFERS[0] else None
        measurements += [
            Measurement.of(f"{name}: {offer.name}p99 over p50", ratios, at_most=at_most),
            Measurement(f"{name}: {offer.name}p50", float(np.median([_p(of, 0.5) for of in outcomes])) * 1e3, "ms"),
            Measurement(f"{name}: {offer.name}p99", float(np.median([_p(of, 0.99) for of in outcomes])) * 1e3, "ms"),
            Measurement(f"{name}: {offer.name}answered", 100 * answered, "%"),
        ]
    return measurements


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


def _offer(server: Server, messages: list[bytes], rate: float, seconds: float, seed: int | None = None) -> Outcome:
    return Offering(server.port, messages, rate=rate, seconds=seconds, connections=_CONNECTIONS, seed=seed).outcome()


def _p(found: Outcome, share: float) -> float:
    """Of the answered ones, in seconds."""
    return found.percentile("answered", share)
