"""Containers that a benchmark starts and asks, by the engine's command line."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2

from bench.core.processes import cpu_seconds

_READY_TIMEOUT_S = 120.0
_POLL_S = 0.005
_CHECK = "/grpc.health.v1.Health/Check"
#: As docs/deployment.md has it.
HARDENED = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges:true")  # noqa: S108


@dataclass(frozen=True, slots=True)
class Container:
    """A running one; ``started_s`` is how long it took from `docker run` to the first SERVING, ``cpu_s`` the processor
    time of its processes until then, or NaN where the engine's processes are not to be seen from here."""

    id: str
    started_s: float
    cpu_s: float


def answers() -> bool:
    """Whether there is an engine."""
    try:
        return subprocess.run([_program(), "info"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def _program() -> str:
    return shutil.which("docker") or "docker"


def docker(*arguments: str) -> str:
    """What ``docker …`` wrote on its standard output. Raises RuntimeError, with what it said, when it fails."""
    environment = {**os.environ, "DOCKER_BUILDKIT": "1"}
    done = subprocess.run([_program(), *arguments], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"docker {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout.strip()


@contextmanager
def serving(image: str, repository: Path) -> Iterator[Container]:
    """A new container of ``image`` with ``repository`` as its models, SERVING; removed when the block ends."""
    began = time.perf_counter()
    given = ("--volume", f"{repository}:/models:ro", "--publish", "127.0.0.1::8001", *HARDENED)
    container = docker("run", "--detach", "--no-healthcheck", *given, image)
    try:
        address = docker("port", container, "8001/tcp").splitlines()[0]
        _wait(address, container)
        started = time.perf_counter() - began
        yield Container(container, started, _used(container))
    finally:
        docker("rm", "--force", container)


def _used(container: str) -> float:
    """Processor seconds of the container's processes so far; NaN where they are not to be seen from here."""
    process = int(docker("inspect", "--format", "{{.State.Pid}}", container))
    try:
        # Of an engine in a virtual machine the number is another process here, or none; it is 0 when a container ended.
        seen = container in Path(f"/proc/{process}/cgroup").read_text("utf-8")
    except OSError:
        seen = False
    return cpu_seconds(process) if seen else float("nan")


def _wait(address: str, container: str) -> None:
    """The engine's proxy takes connections before the server does, so each question gets a channel of its own."""
    request, deadline = health_pb2.HealthCheckRequest().SerializeToString(), time.monotonic() + _READY_TIMEOUT_S
    while time.monotonic() < deadline:
        with grpc.insecure_channel(address) as channel:
            health_check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_CHECK)
            try:
                if health_pb2.HealthCheckResponse.FromString(health_check(request, timeout=1)).status == 1:
                    return
            except grpc.RpcError:
                pass
        time.sleep(_POLL_S)
    raise RuntimeError(f"the container did not become ready:\n{docker('logs', '--tail', '20', container)}")


def layer_bytes(image: str) -> list[int]:
    """Of what the Dockerfile lays over its base, the lowest first, as the engine counts it."""
    lines = docker("history", "--no-trunc", "--human=false", "--format", "{{.Size}} {{.CreatedBy}}", image).splitlines()
    return [int(line.split(" ", 1)[0]) for line in reversed(lines) if "COPY /layer" in line]


def image_bytes(image: str) -> int:
    """All of it, the base included. Not the base's own: BuildKit pulls it without giving its name to an image here."""
    return int(docker("inspect", "--format", "{{.Size}}", image))


def forget(image: str, *others: Path) -> bool:
    """Take the files of ``image``, its base's too, and those under ``others`` out of the page cache.

    False where they cannot be seen: that takes root, and an engine that keeps layers as directories.
    """
    form = "{{.GraphDriver.Data.UpperDir}}:{{.GraphDriver.Data.LowerDir}}"
    directories = [Path(path) for path in docker("inspect", "--format", form, image).split(":") if path.startswith("/")]
    try:
        if not directories or not all(directory.is_dir() for directory in directories):
            return False
        for directory in (*directories, *others):
            for file in directory.rglob("*"):
                if file.is_file() and not file.is_symlink():
                    _forget(file)
    except OSError:
        return False
    return True


def _forget(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
