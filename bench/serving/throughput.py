"""MiniLM served with its defaults to clients that wait for each answer, against bare runtimes without a server.

Twice bare: configured as the server says that it serves (profile, batches at once, threads), and as is fastest here of
all layouts; each with batches of the size that is fastest for it, of those that the server may make. Client and server
share the cores, so the load comes from :mod:`bench.serving.http2`, whose share of the processor is reported.

Two kinds of requests: how much work is in one decides how much of a core its answer leaves for the model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median

import grpc
import numpy as np

from bench.core import models
from bench.core.processes import Server, bf16_serve
from bench.core.results import Measurement, Result
from bench.core.verdict import estimate
from bench.core.workspace import Workspace
from bench.serving import wire
from bench.serving.client import Client, Load
from bench.serving.sessions import Batches, Sessions
from bf16kit.protocol import inference_pb2 as pb

_ALIKE, _BEST = 0.95, 0.85  # the least of the rate of bare sessions: configured alike; the best there are
_LARGEST = 32  # rows of a batch, by default
_ROUNDS, _TURNS, _SECONDS, _SEARCH_S = 5, 2, 2.5, 0.4
_QUICK = 1, 1, 0.5, 0.1


@dataclass(frozen=True, slots=True)
class _Case:
    """One kind of request, and how many clients send it."""

    rows: int
    tokens: int
    clients: int

    @property
    def name(self) -> str:
        return f"{self.clients} clients of {self.rows} × {self.tokens}"


# No more than a batch waits while one request runs: that much is never refused, however slow the machine is.
_CASES = (_Case(1, 16, 16), _Case(1, 128, 16))


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a model is served, as the server tells: profile, and the batches that run at once."""

    profile: str
    instances: int


@dataclass(slots=True)
class _Found:
    """Rates of turns, by round."""

    served: list[list[float]] = field(default_factory=list)
    alike: list[list[float]] = field(default_factory=list)
    best: list[list[float]] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """The ratios of rates turn by turn, and what each side reached."""
    rounds, turns, seconds, search_s = _QUICK if quick else (_ROUNDS, _TURNS, _SECONDS, _SEARCH_S)
    artifact = workspace.minilm()
    repository = workspace.repository("throughput_minilm", artifact)
    log = workspace.root / "throughput_minilm.log"
    found = {case: _Found() for case in _CASES}
    layouts: list[_Layout] = []
    sides: dict[_Case, tuple[Batches, Batches]] = {}
    for _ in range(rounds):
        with ExitStack() as stack:
            server = stack.enter_context(bf16_serve(repository, log))
            layouts.append(_served_layout(server))
            sessions = stack.enter_context(Sessions(artifact, layouts[-1].profile))
            for case in _CASES:
                if case not in sides:
                    sides[case] = _fastest(sessions, case, layouts[0].instances, search_s)
                _round(server, sessions, case, sides[case], found[case], turns, seconds)
    return Result(
        "throughput_minilm",
        tuple(each for case in _CASES for each in _measurements(case, found[case])),
        settings={
            "model": "all-MiniLM-L6-v2, the server's defaults",
            "served": [f"{layout.profile}, {layout.instances} at once" for layout in layouts],
            "alike": {case.name: alike.name for case, (alike, _) in sides.items()},
            "best": {case.name: best.name for case, (_, best) in sides.items()},
            "rounds": rounds,
            "turns": turns,
            "seconds": seconds,
        },
        notes=("rates are medians over turns", "clients, server and bare sessions share the same cores, in turns"),
    )


def _served_layout(server: Server) -> _Layout:
    """What the server says of the model."""
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        model_config: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/{wire.SERVICE}/ModelConfig")
        reply = model_config(pb.ModelConfigRequest(name="minilm").SerializeToString())
    config = pb.ModelConfigResponse.FromString(reply).config
    return _Layout(config.parameters["profile"].string_value, config.instance_group[0].count)


def _layouts(rows: int, tokens: int) -> Iterator[Batches]:
    """A batch on all cores, one for each core with a thread, and as many at once on one session of all cores."""
    cores = len(os.sched_getaffinity(0))
    yield Batches(1, cores, rows, tokens, shared=True)
    if cores > 1:
        yield Batches(cores, 1, rows, tokens)
        yield Batches(2, cores, rows, tokens, shared=True)


def _fastest(sessions: Sessions, case: _Case, instances: int, seconds: float) -> tuple[Batches, Batches]:
    """Of all batches with as many at once as the server has, and of all there are."""
    sizes = [case.rows * count for count in (1, 2, 4, 8, 16, 32) if case.rows * count <= _LARGEST]
    rates = {each: sessions.rate(each, seconds) for rows in sizes for each in _layouts(rows, case.tokens)}
    alike = [each for each in rates if each.at_once == instances]
    return max(alike, key=lambda each: rates[each]), max(rates, key=lambda each: rates[each])


def _round(
    server: Server,
    sessions: Sessions,
    case: _Case,
    sides: tuple[Batches, Batches],
    found: _Found,
    turns: int,
    seconds: float,
) -> None:
    """Turns of all three; every other time the other way round."""
    alike, best = sides
    request = wire.infer_request("minilm", models.minilm_feeds(case.rows, case.tokens))
    rates: dict[str, list[float]] = {"served": [], "alike": [], "best": []}
    with Client(server.port, request) as client:
        client.load(case.clients, seconds / 3)

        def served() -> float:
            found.loads.append(client.load(case.clients, seconds))
            return found.loads[-1].rate * case.rows

        runs = {
            "served": served,
            "alike": lambda: sessions.rate(alike, seconds),
            "best": lambda: sessions.rate(best, seconds),
        }
        for turn in range(turns):
            for name in runs if turn % 2 == 0 else reversed(runs):
                rates[name].append(runs[name]())
    found.served.append(rates["served"])
    found.alike.append(rates["alike"])
    found.best.append(rates["best"])


def _measurements(case: _Case, found: _Found) -> list[Measurement]:
    def over(bare: list[list[float]], at_least: float, what: str) -> Measurement:
        ratios = [np.array(ours) / np.array(theirs) for ours, theirs in zip(found.served, bare, strict=True)]
        return Measurement.of(f"{case.name}: served ÷ {what}", estimate(ratios), at_least=at_least)

    def rate(name: str, turns: list[list[float]]) -> Measurement:
        return Measurement(f"{case.name}: {name}", median(each for of in turns for each in of), "rows/s")

    client = 100 * median(load.client_cpu_s / load.seconds for load in found.loads) / len(os.sched_getaffinity(0))
    return [
        over(found.alike, _ALIKE, "bare sessions alike"),
        over(found.best, _BEST, "the best bare sessions"),
        rate("served", found.served),
        rate("bare sessions alike", found.alike),
        rate("the best bare sessions", found.best),
        Measurement(f"{case.name}: processor time of the client", client, "% of the machine"),
    ]
