"""The same models behind Ray Serve and served by `bf16-serve`, on the same cores: rate, latency, memory, work.

Both start anew in every round, and are asked in turns. The client, on the same cores too, costs both alike; what a
request costs a server in processor time is measured beside it, so that machines of more cores can be reckoned with.

It runs where Ray is: `sh tests/ray/run.sh build/environments/ray/bin/python -m bench ray`, after `make test-ray`.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import numpy as np

from bench.core import models
from bench.core.grid import Grid
from bench.core.processes import Server, bf16_serve, peer_server, proportional_bytes
from bench.core.results import Measurement, Result
from bench.core.verdict import estimate
from bench.core.workspace import Workspace
from bench.serving import wire
from bench.serving.client import Client

_PLAIN, _RAY = "bf16-serve", "Ray Serve"
_IN_FLIGHT = (1, 8, 16, 32)
_ROUNDS, _SECONDS = 5, 1.5
_QUICK = 1, 0.3
Case = tuple[str, int]  # a model, and the requests in flight


@dataclass(slots=True)
class _Found:
    """By side: of each case a value for each round."""

    rate: dict[str, dict[Case, list[float]]] = field(default_factory=lambda: {_PLAIN: {}, _RAY: {}})
    p50: dict[str, dict[Case, list[float]]] = field(default_factory=lambda: {_PLAIN: {}, _RAY: {}})
    p99: dict[str, dict[Case, list[float]]] = field(default_factory=lambda: {_PLAIN: {}, _RAY: {}})
    work: dict[str, dict[Case, list[float]]] = field(default_factory=lambda: {_PLAIN: {}, _RAY: {}})
    memory: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    started: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """Rates of Ray Serve as parts of the plain server's, and what each call takes longer."""
    if find_spec("ray") is None:
        return Result("ray", skipped="Ray is not installed here: make test-ray installs it, see docs/scaling.md")
    rounds, seconds = _QUICK if quick else (_ROUNDS, _SECONDS)
    repository = _repository(workspace)
    requests = {
        "MLP": wire.infer_request("mlp", models.mlp_feeds(rows=1)),
        "MiniLM": wire.infer_request("minilm", models.minilm_feeds(1, models.TOKENS)),
    }
    found = _Found()
    for number in range(rounds):
        _round(workspace, repository, requests, seconds, found, backwards=number % 2 == 1)
    return Result(
        "ray",
        _measurements(found),
        settings={
            "models": f"16→16 MLP; MiniLM, 1 × {models.TOKENS} tokens",
            "servers": "one process; one replica of each model, a proxy, a front, one node",
            "rounds": rounds,
            "seconds": seconds,
            "cores": _cores(),
        },
        notes=("server and client share the same cores; rates are medians over rounds",),
        grids=[_grid("requests per second", "1/s", found.rate), _grid("median latency", "ms", found.p50)],
    )


def _repository(workspace: Workspace) -> Path:
    root = workspace.root / "ray-repository"
    shutil.rmtree(root, ignore_errors=True)
    for artifact in (workspace.mlp(), workspace.minilm()):
        shutil.copytree(artifact, root / artifact.parent.name / "1", copy_function=os.link)
    return root


def _round(
    workspace: Workspace,
    repository: Path,
    requests: Mapping[str, bytes],
    seconds: float,
    found: _Found,
    *,
    backwards: bool,
) -> None:
    logs = workspace.root / "ray-plain.log", workspace.root / "ray-serve.log"

    def command(ports: list[int]) -> list[str]:
        where = ("--grpc-port", str(ports[0]), "--http-port", str(ports[1]), "--repository", str(repository))
        return [sys.executable, "-m", "deploy.ray", *where, "--device", "cpu", "--cpus", str(_cores() / 4)]

    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "BF16KIT_THREADS": str(_cores())}
    with (
        bf16_serve(repository, logs[0]) as plain,
        peer_server(command, logs[1], environment, "minilm") as behind_ray,
    ):
        sides = [(_PLAIN, plain), (_RAY, behind_ray)]
        for side, server in sides:
            found.started[side].append(server.started_s)
        for model, request in requests.items():
            with Client(plain.port, request) as direct, Client(behind_ray.port, request) as proxied:
                clients = {_PLAIN: direct, _RAY: proxied}
                for client in clients.values():
                    client.timed_load(8, seconds)  # connections, threads and the models' first batches
                for count in _IN_FLIGHT:
                    for side, server in reversed(sides) if backwards else sides:
                        _turn(found, side, server, clients[side], (model, count), seconds)
        for side, server in sides:
            found.memory[side].append(proportional_bytes(server) / 1e6)


def _turn(found: _Found, side: str, server: Server, client: Client, case: Case, seconds: float) -> None:
    before = server.cpu_seconds()
    load = client.timed_load(case[1], seconds)
    found.rate[side].setdefault(case, []).append(load.rate)
    found.p50[side].setdefault(case, []).append(load.p50 * 1e3)
    found.p99[side].setdefault(case, []).append(load.p99 * 1e3)
    found.work[side].setdefault(case, []).append((server.cpu_seconds() - before) / load.calls * 1e3)


def _measurements(found: _Found) -> list[Measurement]:
    measurements: list[Measurement] = []
    for case in found.rate[_PLAIN]:
        name = f"{case[0]}, {case[1]} in flight"
        pairs = zip(found.rate[_RAY][case], found.rate[_PLAIN][case], strict=True)
        ratios = estimate([np.array([ray / plain]) for ray, plain in pairs])
        measurements.append(Measurement.of(f"{name}: rate of Ray Serve ÷ plain", ratios))
        for side in (_PLAIN, _RAY):
            measurements += [
                Measurement(f"{name}: {side}", median(found.rate[side][case]), "1/s"),
                Measurement(f"{name}: {side}, median latency", median(found.p50[side][case]), "ms"),
                Measurement(f"{name}: {side}, 99th percentile", median(found.p99[side][case]), "ms"),
                Measurement(f"{name}: {side}, processor time per request", median(found.work[side][case]), "ms"),
            ]
    for side in (_PLAIN, _RAY):
        measurements.append(Measurement(f"{side}: memory of all its processes", median(found.memory[side]), "MB"))
        measurements.append(Measurement(f"{side}: start to ready", median(found.started[side]), "s"))
    return measurements


def _grid(title: str, unit: str, values: Mapping[str, Mapping[Case, list[float]]]) -> Grid:
    rows = {
        f"{model}, {count} in flight": [median(values[side][model, count]) for side in (_PLAIN, _RAY)]
        for model, count in values[_PLAIN]
    }
    return Grid(title, unit, (_PLAIN, _RAY), rows)


def _cores() -> int:
    return len(os.sched_getaffinity(0))
