"""MiniLM served with its defaults to clients that wait for each answer, against bare runtimes without a server.

Twice bare: configured as the server says that it serves (profile, batches at once, threads), and as is fastest here of
all layouts; each with batches of the size that is fastest for it, of those that the server may make. Client and server
share the cores, so the load comes from :mod:`bench.serving.http2`, whose share of the processor is reported.

Two kinds of requests: how much work is in one decides how much of a core its answer leaves for the model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median

import grpc

from bench.core import models
from bench.core.processes import Server, bf16_serve
from bench.core.results import Measurement, Result
from bench.core.rounds import Effort, Round, Turn, samples, take_turns
from bench.core.verdict import FEWEST_PROCESSES, ratio, typical
from bench.core.workspace import Workspace
from bench.serving import wire
from bench.serving.client import Client
from bench.serving.sessions import Batches, Sessions
from bf16kit.protocol import inference_pb2 as pb

SERVED, ALIKE, BEST = "served", "bare sessions alike", "the best bare sessions"
_AT_LEAST = {ALIKE: 0.95, BEST: 0.85}  # of their rates
_LARGEST = 32  # rows of a batch, by default
_FULL, _QUICK = Effort(FEWEST_PROCESSES, 2, 2.5), Effort(1, 1, 0.5)
_SEARCH = 0.16  # of a turn's seconds, for each layout
_RATE, _CLIENT = "rows/s", "processor time of the client"


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


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """The ratios of rates turn by turn, and what each side reached."""
    effort = _QUICK if quick else _FULL
    artifact = workspace.minilm()
    repository = workspace.repository("throughput_minilm", artifact)
    log = workspace.root / "throughput_minilm.log"
    found: dict[_Case, list[Round]] = {case: [] for case in _CASES}
    layouts: list[tuple[str, int]] = []
    sides: dict[_Case, dict[str, Batches]] = {}
    for _ in range(effort.rounds):
        with ExitStack() as stack:
            server = stack.enter_context(bf16_serve(repository, log))
            layouts.append(_served_layout(server))
            sessions = stack.enter_context(Sessions(artifact, layouts[-1][0]))
            for case in _CASES:
                if case not in sides:
                    sides[case] = _fastest(sessions, case, layouts[0][1], effort.seconds * _SEARCH)
                found[case].append(_round(server, sessions, case, sides[case], effort))
    return Result(
        "throughput_minilm",
        tuple(each for case in _CASES for each in _measurements(case, found[case])),
        settings={
            "model": "all-MiniLM-L6-v2, the server's defaults",
            "served": [f"{profile}, {instances} at once" for profile, instances in layouts],
            "alike": {case.name: bare[ALIKE].name for case, bare in sides.items()},
            "best": {case.name: bare[BEST].name for case, bare in sides.items()},
            "rounds": effort.rounds,
            "turns": effort.turns,
            "seconds": effort.seconds,
        },
        notes=("rates are medians over turns", "clients, server and bare sessions share the same cores, in turns"),
    )


def _served_layout(server: Server) -> tuple[str, int]:
    """What the server says of the model: its profile, and the batches that run at once."""
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        model_config: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/{wire.SERVICE}/ModelConfig")
        reply = model_config(pb.ModelConfigRequest(name="minilm").SerializeToString())
    config = pb.ModelConfigResponse.FromString(reply).config
    return config.parameters["profile"].string_value, config.instance_group[0].count


def _layouts(rows: int, tokens: int) -> Iterator[Batches]:
    """A batch on all cores, one for each core with a thread, and as many at once on one session of all cores."""
    cores = len(os.sched_getaffinity(0))
    yield Batches(1, cores, rows, tokens, shared=True)
    if cores > 1:
        yield Batches(cores, 1, rows, tokens)
        yield Batches(2, cores, rows, tokens, shared=True)


def _fastest(sessions: Sessions, case: _Case, instances: int, seconds: float) -> dict[str, Batches]:
    """Of all batches with as many at once as the server has, and of all there are."""
    sizes = [case.rows * count for count in (1, 2, 4, 8, 16, 32) if case.rows * count <= _LARGEST]
    rates = {each: sessions.rate(each, seconds) for rows in sizes for each in _layouts(rows, case.tokens)}
    alike = [each for each in rates if each.at_once == instances]
    return {ALIKE: max(alike, key=lambda each: rates[each]), BEST: max(rates, key=lambda each: rates[each])}


def _round(server: Server, sessions: Sessions, case: _Case, bare: dict[str, Batches], effort: Effort) -> Round:
    """Turns of all three."""
    request = wire.infer_request("minilm", models.minilm_feeds(case.rows, case.tokens))
    with Client(server.port, request) as client:
        client.load(case.clients, effort.seconds / 3)

        def served() -> Turn:
            load = client.load(case.clients, effort.seconds)
            return {_RATE: load.rate * case.rows, _CLIENT: load.client_cpu_s / load.seconds}

        def alone(side: str) -> Turn:
            return {_RATE: sessions.rate(bare[side], effort.seconds)}

        return take_turns({SERVED: served, ALIKE: lambda: alone(ALIKE), BEST: lambda: alone(BEST)}, effort.turns)


def _measurements(case: _Case, rounds: Sequence[Round]) -> Iterator[Measurement]:
    rates = samples(rounds, _RATE)
    for side, at_least in _AT_LEAST.items():
        found = ratio(rates[SERVED], rates[side])
        yield Measurement.of(f"{case.name}: {SERVED} ÷ {side}", found, at_least=at_least)
    for side, of in rates.items():
        yield Measurement(f"{case.name}: {side}", typical(of), _RATE)
    client = median(turn[_CLIENT] for found in rounds for turn in found[SERVED]) / len(os.sched_getaffinity(0))
    yield Measurement(f"{case.name}: {_CLIENT}", 100 * client, "% of the machine")
