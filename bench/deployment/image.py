"""The server's image: how much it adds to its base, and how long a new container takes until it serves MiniLM.

The image is built from this tree; layers come from the engine's cache where it has them. Containers are started as
docs/deployment.md says, hardened and with a port published, and each is a new one. They are timed from the start of
`docker run` to the first SERVING that grpc.health.v1 answers to a client outside. Cold: the files of the image and of
the model are taken out of the page cache before; the engine's own programs stay in it.
"""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from bench.core.machine import ROOT
from bench.core.results import Measurement, Result
from bench.core.workspace import Workspace
from bench.deployment.containers import answers, docker, forget, image_bytes, layer_bytes, serving

BASE = "python:3.11-slim-bookworm"
_MB_AT_MOST = 350.0
_READY_AT_MOST_S = 5.0
_STARTS, _CHECKS = 5, 9
_QUICK = 1, 2
# Within the container: wall and processor seconds of each health check.
_HEALTH = """
import json, resource, subprocess, sys, time
def once():
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(["bf16-serve", "health"], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - began, used
once()
print(json.dumps([once() for _ in range(int(sys.argv[1]))]))
"""


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """Sizes as the engine counts them, starts cold and warm in turns, and health checks within the last container."""
    if not answers():
        return Result("image", skipped="no Docker engine answers here")
    starts, checks = _QUICK if quick else (_STARTS, _CHECKS)
    image = f"bf16kit-bench-{uuid.uuid4().hex[:8]}"
    repository = _readable(workspace.repository("image", workspace.minilm()))
    index = ("--build-arg", f"PIP_EXTRA_INDEX_URL={os.environ.get('PIP_EXTRA_INDEX_URL', '')}")
    docker("build", "--quiet", "--target", "server", "--tag", image, *index, str(ROOT))
    try:
        layers, total_bytes = layer_bytes(image), image_bytes(image)
        cold, warm, cpu = _starts(image, repository, starts)
        with serving(image, repository) as container:
            health = json.loads(docker("exec", container.id, "python", "-c", _HEALTH, str(checks)))
    finally:
        docker("rmi", "--force", image)
    return Result(
        "image",
        (*sizes(layers, total_bytes), *times(cold, warm, cpu), *checked(health)),
        settings={
            "starts": starts,
            "health_checks": checks,
            "engine": docker("version", "--format", "{{.Server.Version}}"),
            "base": BASE,
        },
    )


def sizes(layers: Sequence[int], total_bytes: int) -> Iterator[Measurement]:
    """Of an image of ``total_bytes`` bytes, of which the Dockerfile's own ``layers`` are so many each."""
    own = sum(layers)
    yield Measurement("server without torch, beyond its base", own / 1e6, "MB", at_most=_MB_AT_MOST)
    yield Measurement("its base", (total_bytes - own) / 1e6, "MB")
    for number, size in enumerate(layers, 1):
        yield Measurement(f"layer {number} of {len(layers)}", size / 1e6, "MB")


def times(cold: Sequence[float], warm: Sequence[float], cpu: Sequence[float]) -> Iterator[Measurement]:
    """Of starts: seconds until SERVING, and processor seconds until then, NaN where those were not to be seen."""
    yield from _start_times("page cache cold", cold)
    yield from _start_times("page cache warm", warm)
    name, seen = "processor time of the container until then", [used for used in cpu if not math.isnan(used)]
    if len(seen) < len(cpu):
        yield Measurement(name, math.nan, "s", absent="the engine's processes are not to be seen from here")
    else:
        yield Measurement(name, median(seen), "s")


def checked(health: Sequence[Sequence[float]]) -> Iterator[Measurement]:
    """Of health checks: wall and processor seconds of each."""
    walls, used = zip(*health, strict=True)
    yield Measurement("bf16-serve health within the container", median(walls), "s")
    yield Measurement("processor time of that", median(used), "s")


def _starts(image: str, repository: Path, times: int) -> tuple[list[float], list[float], list[float]]:
    """Seconds of each, cold (none where files cannot be taken out of the cache) and warm, in turns; and the processor
    time of the warm ones."""
    cold: list[float] = []
    warm: list[float] = []
    cpu: list[float] = []
    with serving(image, repository):
        pass  # what the engine does once for an image is not a start's
    for _ in range(times):
        if forget(image, repository):
            with serving(image, repository) as container:
                cold.append(container.started_s)
        with serving(image, repository) as container:
            warm.append(container.started_s)
            cpu.append(container.cpu_s)
    return cold, warm, cpu


def _start_times(what: str, seconds: Sequence[float]) -> Iterator[Measurement]:
    name = f"docker run to SERVING with MiniLM, {what}"
    if not seconds:
        yield Measurement(name, math.nan, "s", _READY_AT_MOST_S, absent="needs root, and layers as directories")
        return
    yield Measurement(name, median(seconds), "s", _READY_AT_MOST_S)
    yield Measurement(f"fastest start, {what}", min(seconds), "s")
    yield Measurement(f"slowest start, {what}", max(seconds), "s")


def _readable(repository: Path) -> Path:
    """For user 10001 of the container, whatever this user's umask is."""
    for path in (repository, *repository.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return repository
