"""Two workers against one, with one thread for a run: a model that needs all of a core, and one that needs little.

The second worker can do no more than its core: here the clients, and the supervisor, have no other to be on.
"""

from __future__ import annotations

from pathlib import Path

from bench.core import models
from bench.core.processes import bf16_serve
from bench.core.results import Measurement, Result
from bench.core.verdict import ratio
from bench.core.workspace import Workspace
from bench.peers import rates
from bench.peers.contenders import Contender
from bench.peers.rates import Effort, Found
from bench.serving import wire

_AT_LEAST = 1.8
_IN_FLIGHT = 16
_ONE, _TWO = "1 worker", "2 workers"


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """Requests per second of two workers over those of one."""
    effort = rates.QUICK if quick else rates.FULL
    cases = {
        "MiniLM, 64 tokens": (workspace.minilm(), wire.infer_request("minilm", models.minilm_feeds(1, 64))),
        "16→16 MLP": (workspace.mlp(), wire.infer_request("mlp", models.mlp_feeds(rows=1))),
    }
    settings = {"in flight": _IN_FLIGHT, "profile": "auto", "threads": 1}
    found = {
        name: _measured(_servers(workspace, artifact), request, effort) for name, (artifact, request) in cases.items()
    }
    measurements = [
        Measurement.of(f"{name}: {_TWO} against {_ONE}", ratio(of.seconds[_ONE], of.seconds[_TWO]), at_least=_AT_LEAST)
        for name, of in found.items()
    ]
    return rates.described("workers", (_ONE, _TWO), found, measurements, effort, settings)


def _measured(servers: list[Contender], request: bytes, effort: Effort) -> Found:
    requests = {server.name: request for server in servers}
    return rates.measured(servers, requests, (_IN_FLIGHT,), effort, "http2")[_IN_FLIGHT]


def _servers(workspace: Workspace, artifact: Path) -> list[Contender]:
    repository = workspace.repository("workers", artifact)
    config = workspace.root / "workers.yaml"
    config.write_text("threads: 1\n", "utf-8")

    def server(name: str, workers: int) -> Contender:
        log = workspace.root / f"workers-{workers}.log"
        flags = ("--config", str(config), "--workers", str(workers))
        return Contender(name, "threads: 1", lambda: bf16_serve(repository, log, *flags))

    return [server(_ONE, 1), server(_TWO, 2)]
