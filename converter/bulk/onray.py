"""Runs conversions on the nodes of a Ray cluster that share the file system of the checkpoints and the models."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import ray
from ray.exceptions import OutOfMemoryError, RayError

from bf16kit import __version__
from bf16kit.converter.bulk.conversions import FAILED, INTERRUPTED, Run, run_here
from bf16kit.messages.errors import UsageError
from bf16kit.messages.wording import first_line
from bf16kit.system.rayaddress import check_reachable

_ATTEMPTS = 3
_SECONDS = 0.5  # between two looks at the event


def on_cluster(address: str, jobs: int | None, notify: Callable[[str], None]) -> tuple[Run, int]:
    """Return what runs a conversion on the cluster at ``address``, and ``jobs``, by default one for each node.

    Raises :class:`UsageError` if no cluster answers. If a node dies, its conversion is begun again on another one.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        check_reachable(address)
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(f"--ray {address}: cannot connect to a Ray cluster: {first_line(error)}") from None
    counts = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    if not (cores := [count for count in counts if count]):
        raise UsageError(f"--ray {address}: no node of the cluster has a CPU")
    jobs = jobs or len(cores)
    each = max(1, min(sum(cores) // jobs, *cores))
    task = ray.remote(num_cpus=each, max_retries=0, scheduling_strategy="SPREAD")(_run)

    def run(command: list[str], log: Path, stop: threading.Event) -> int:
        log.touch()
        for attempt in range(1, _ATTEMPTS + 1):
            reference = task.remote(command, str(log.absolute()), str(Path.cwd()), __version__)
            while not ray.wait([reference], timeout=_SECONDS)[0]:
                if stop.is_set():
                    ray.cancel(reference, force=True)  # the process ends with the worker that it follows
                    return INTERRUPTED
            try:
                found = ray.get(reference)
            except OutOfMemoryError:
                return -signal.SIGKILL
            except RayError as error:
                died = f"the process or node that converted it died ({type(error).__name__})"
                notify(f"{log.stem}: {died}, attempt {attempt} of {_ATTEMPTS}")
                continue
            if isinstance(found, str):
                raise UsageError(f"--ray: {found}")
            return int(found)
        return FAILED

    return run, jobs


def _run(command: list[str], log: str, directory: str, version: str) -> int | str:
    """Run a command line of this program on a node; return its exit code, or what is wrong with the node."""
    node = f"node {ray.util.get_node_ip_address()}"
    if not (Path(log).is_file() and Path(directory).is_dir()):
        remedy = "put the checkpoints, the repository and the working directory on a file system that all nodes share"
        return f"{node} does not see {log} and {directory}; {remedy}"
    if version != __version__:
        return f"{node} has bf16kit {__version__}, and this machine {version}; install the same version on all nodes"
    return run_here([sys.executable, *command[1:]], Path(log), threading.Event(), directory)
