"""MiniLM served to 16 clients of one row of 16 tokens each, against a bare ONNX Runtime session in this process.

The bare session runs the same ``cpu.onnx`` in a loop, at the batch size where it is fastest on this machine, with
ONNX Runtime's busy waiting on or off, whichever is faster: no gRPC, no batching, no clients. The server shares the same
cores with its clients, so the load comes from :mod:`bench.serving.http2`, whose share of the processor is reported;
blocks with grpcio's own client stand beside it. Blocks against the server and the session take turns.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.core import models
from bench.core.processes import bf16_serve
from bench.core.results import Measurement, Result
from bench.core.workspace import Workspace
from bench.serving import wire
from bench.serving.client import Client, Load
from bf16kit.runtime.kernel import kernel_for
from bf16kit.runtime.session import Session, open_session

_AT_LEAST = 0.85
_CLIENTS = 16
_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_ROUNDS, _BLOCKS, _SECONDS = 5, 3, 3.0
_QUICK = 1, 1, 0.5
# Two batches at once with one thread each, rather than one batch with two: threads that share a batch wait for each
# other at every operator, and wait longest while one of them is kept from its core by the server's own threads.
# Batches of 6 of 16 clients: while two run, the other four clients' calls are on their way, and no core waits for them.
_SERVING = "profile: cpu\ninstances: {cores}\nmax_batch_size: {rows}\n"
_CONFIG = "threads: 1\n"


@dataclass(frozen=True)
class Direct:
    """``at_once`` threads that each run ``session`` on a batch of ``rows`` over and over."""

    session: Session
    rows: int
    at_once: int = 1
    name: str = ""

    def rate(self, seconds: float) -> float:
        """Rows per second over about ``seconds``, after one run that does not count."""
        feeds = models.minilm_feeds(self.rows)
        self.session.run(None, feeds)
        runs = [0] * self.at_once
        started = time.perf_counter()

        def work(index: int) -> None:
            while time.perf_counter() - started < seconds:
                self.session.run(None, feeds)
                runs[index] += 1

        threads = [threading.Thread(target=work, args=(index,)) for index in range(self.at_once)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(runs) * self.rows / (time.perf_counter() - started)


@dataclass(frozen=True)
class Blocks:
    """Rates and loads of blocks that took turns."""

    served: list[Load]
    direct: list[float]
    paired: list[float]  # the session with the server's own thread settings
    grpcio: list[Load]


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """The ratio of the median rates, and what each side reached."""
    rounds, blocks, seconds = _QUICK if quick else (_ROUNDS, _BLOCKS, _SECONDS)
    artifact = workspace.minilm()
    cores = len(os.sched_getaffinity(0))
    graph = artifact / "cpu.onnx"
    direct = _fastest(_one_at_a_time(graph), seconds / 3)
    paired = _fastest(_like_the_server(graph, cores), seconds / 3)
    serving = _SERVING.format(cores=cores, rows=_CLIENTS * 3 // 4 // cores)
    repository = workspace.repository("throughput_minilm", artifact, serving)
    found = Blocks([], [], [], [])
    for _ in range(rounds):
        _round(workspace, repository, (direct, paired), found, blocks, seconds)
    return _result(found, direct, paired, {"serving": serving, "rounds": rounds, "blocks": blocks, "seconds": seconds})


def _one_at_a_time(graph: Path) -> Iterable[Direct]:
    for spin in (False, True):
        session = open_session(graph, spin=spin, library=kernel_for(graph).library)
        for rows in _BATCHES:
            name = f"all cores on one batch of {rows}, busy waiting {'on' if spin else 'off'}"
            yield Direct(session, rows, name=name)


def _like_the_server(graph: Path, cores: int) -> Iterable[Direct]:
    session = open_session(graph, threads=1, library=kernel_for(graph).library)
    for rows in _BATCHES:
        yield Direct(session, rows, cores, name=f"{cores} batches of {rows} at once, one thread each")


def _fastest(candidates: Iterable[Direct], seconds: float) -> Direct:
    """The candidate with the highest rate; which sessions lose is forgotten, and with them their threads."""
    return max(((candidate.rate(seconds), index, candidate) for index, candidate in enumerate(candidates)))[2]


def _round(
    workspace: Workspace, repository: Path, sessions: tuple[Direct, Direct], found: Blocks, blocks: int, seconds: float
) -> None:
    """Blocks against one fresh server, which goes first in every other one."""
    config = workspace.root / "server.yaml"
    config.write_text(_CONFIG, "utf-8")
    direct, paired = sessions
    with ExitStack() as stack:
        log = workspace.root / "throughput_minilm.log"
        server = stack.enter_context(bf16_serve(repository, log, "--config", str(config)))
        client = stack.enter_context(Client(server.port, wire.infer_request("minilm", models.minilm_feeds(1))))
        client.load(_CLIENTS, seconds / 3, "http2")
        for block in range(blocks):
            if block % 2:
                found.direct.append(direct.rate(seconds))
            found.served.append(client.load(_CLIENTS, seconds, "http2"))
            if not block % 2:
                found.direct.append(direct.rate(seconds))
        found.paired.append(paired.rate(seconds))
        found.grpcio.append(client.load(_CLIENTS, seconds, "grpcio"))


def _result(found: Blocks, direct: Direct, paired: Direct, how: dict[str, Any]) -> Result:
    served, bare, same = _rate(found.served), median(found.direct), median(found.paired)
    return Result(
        "throughput_minilm",
        (
            Measurement("ratio to the bare session", served / bare, at_least=_AT_LEAST),
            Measurement("bf16-serve, 16 clients", served, "rows/s"),
            Measurement("bare session at its best batch size", bare, "rows/s"),
            Measurement("ratio to bare sessions threaded like the server", served / same),
            Measurement("bare sessions threaded like the server", same, "rows/s"),
            Measurement("processor time of the client", _client_share(found.served), "% of the machine"),
            Measurement("bf16-serve, clients in grpcio", _rate(found.grpcio), "rows/s"),
            Measurement("ratio to the bare session, clients in grpcio", _rate(found.grpcio) / bare),
            Measurement("processor time of the client in grpcio", _client_share(found.grpcio), "% of the machine"),
        ),
        settings={
            "model": "all-MiniLM-L6-v2, profile cpu, 16 tokens per row",
            "clients": _CLIENTS,
            "server_yaml": _CONFIG,
            "bare_session": direct.name,
            "bare_sessions_like_the_server": paired.name,
        }
        | how,
        notes=("rates are medians over blocks", "clients, server and bare session share the same cores"),
    )


def _rate(loads: list[Load]) -> float:
    return median(load.rate for load in loads)


def _client_share(loads: list[Load]) -> float:
    """Processor time of the client process, in percent of all cores."""
    cores = len(os.sched_getaffinity(0))
    return 100 * median(load.client_cpu_s / load.seconds / cores for load in loads)
