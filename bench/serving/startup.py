"""How long the programs take to answer: ``--help`` of both, and the server from its start until MiniLM is ready."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from bench.core.processes import bf16_serve
from bench.core.results import Measurement, Result
from bench.core.workspace import Workspace, program

_HELP_AT_MOST_S = 0.5
_READY_AT_MOST_S = 3.0
_HELPS, _STARTS = 7, 5
_QUICK = 2, 1


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """Medians of several starts, after one that brings the imported files into the page cache."""
    helps, starts = _QUICK if quick else (_HELPS, _STARTS)
    repository = workspace.repository("startup", workspace.minilm())
    log = workspace.root / "startup.log"
    ready = _after_the_first(starts, lambda: _ready_seconds(repository, log))
    return Result(
        "startup",
        (
            *(_help(name, helps) for name in ("bf16-convert", "bf16-serve")),
            Measurement("server start to ready with MiniLM", median(ready), "s", at_most=_READY_AT_MOST_S),
            Measurement("slowest of these starts", max(ready), "s"),
        ),
        settings={"helps": helps, "starts": starts, "serving": "defaults"},
        notes=("ready is ServerReady over gRPC: digests checked, probe and golden samples run",),
    )


def _help(name: str, times: int) -> Measurement:
    seconds = median(_after_the_first(times, lambda: _help_seconds(name)))
    return Measurement(f"{name} --help", seconds, "s", at_most=_HELP_AT_MOST_S)


def _after_the_first(times: int, once: Callable[[], float]) -> list[float]:
    """``once`` run ``times`` times, after one time that does not count."""
    once()
    return [once() for _ in range(times)]


def _ready_seconds(repository: Path, log: Path) -> float:
    with bf16_serve(repository, log) as server:
        return server.started_s


def _help_seconds(name: str) -> float:
    started = time.perf_counter()
    subprocess.run([program(name), "--help"], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started
