"""Runs conversions on the nodes of a Ray cluster that share the file system of the checkpoints and the models.

What is done and what is to be done is decided here, from the same records as without Ray. A node only runs one command
and returns its exit code.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import (
    NodeDiedError,
    OutOfMemoryError,
    RayError,
    TaskCancelledError,
    TaskUnschedulableError,
    WorkerCrashedError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import bf16kit
from bf16kit.messages.errors import UsageError
from bf16kit.messages.wording import first_line
from bf16kit.system.rayaddress import check_reachable
from converter.bulk.executor import Process, start_process
from converter.process import children

_ATTEMPTS = 3
_POLL_SECONDS = 0.5
_GRACE_SECONDS = 30.0  # time to end for a conversion that was told to stop
_FAILED = 3  # the exit code if a conversion's node died in every attempt
_INTERRUPTED = 130
Notify = Callable[[str], None]


class RayExecutor:
    """Runs ``jobs`` conversions at a time; None means one per node. See :class:`converter.bulk.executor.Executor`.

    Raises UsageError if no cluster answers, or if a node does not see the same files or runs another version.
    """

    def __init__(self, address: str, source: Path, repository: Path, jobs: int | None, notify: Notify) -> None:
        _join(address)
        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
        if not nodes:
            raise UsageError(f"--ray {address}: no node of the cluster has a CPU")
        nodes = _responding_nodes(nodes, source, repository, notify)
        if not nodes:
            raise UsageError(f"--ray {address}: no node of the cluster answers; check `ray status`")
        self.jobs = jobs or len(nodes)
        self.stopped = False
        processors = sum(node["Resources"]["CPU"] for node in nodes)
        each = max(1, min(int(processors // self.jobs), *(int(node["Resources"]["CPU"]) for node in nodes)))
        self._remote = ray.remote(num_cpus=each, max_retries=0, scheduling_strategy="SPREAD")(_run)
        self._notify = notify
        self._lock = threading.Lock()
        self._running: set[_Task] = set()

    def start(self, command: list[str], log: Path) -> Process:
        directory = str(Path.cwd())
        task = _Task(lambda: self._remote.remote(command, str(log.absolute()), directory), log.stem, self._notify)
        with self._lock:
            self._running.add(task)
            if self.stopped:
                task.cancel()
        return task

    def stop(self) -> None:
        with self._lock:
            self.stopped = True
            for task in self._running:
                task.cancel()

    def close(self) -> None:
        """Leave the cluster, or end it if it was started here."""
        ray.shutdown()


class _Task:
    """A conversion on a node; see :class:`converter.bulk.executor.Process`. If its node dies, it is started again."""

    def __init__(self, submit: Callable[[], Any], model: str, notify: Notify) -> None:
        self._submit = submit
        self._model = model
        self._notify = notify
        self._cancelled = False
        self._reference = submit()

    def cancel(self) -> None:
        self._cancelled = True
        with contextlib.suppress(RayError, ValueError):
            ray.cancel(self._reference)

    def wait(self) -> int:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return int(ray.get(self._reference))
            except (TaskCancelledError, KeyboardInterrupt):
                if not self._cancelled:
                    raise
                return _INTERRUPTED
            except OutOfMemoryError:
                return -signal.SIGKILL
            except RayError as error:
                if self._cancelled:
                    return _INTERRUPTED
                again = attempt < _ATTEMPTS
                then = f"it is started again, attempt {attempt + 1} of {_ATTEMPTS}" if again else "no attempt is left"
                self._notify(
                    f"{self._model}: the process or node that converted it died ({type(error).__name__}); {then}"
                )
                if again:
                    self._reference = self._submit()
        return _FAILED


def _run(command: list[str], log: str, directory: str) -> int:
    """Run this program's command line on a node, by the node's Python, and return its exit code."""
    prefix = children.command("bf16kit.system.exit_with_parent", str(os.getpid()))
    process = start_process([*prefix, sys.executable, *command[1:]], Path(log), Path(directory))
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(_POLL_SECONDS)
    except BaseException:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
        raise


def _join(address: str) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        check_reachable(address)
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(f"--ray {address}: cannot connect to a Ray cluster: {first_line(error)}") from None


def _responding_nodes(
    nodes: list[dict[str, Any]], source: Path, repository: Path, notify: Notify
) -> list[dict[str, Any]]:
    """Return ``nodes`` without those that have just died, which Ray takes some seconds to notice.

    Every other node must see the checkpoints and a file that this process has just written, and run the same version.
    Raises UsageError that names the node.
    """
    from converter.bulk.item import RECORDS

    records = (repository / RECORDS).absolute()
    records.mkdir(parents=True, exist_ok=True)
    token = records / f"{secrets.token_hex(8)}.tmp"
    token.write_text(token.name)
    paths = str(token), str(source.absolute()), str(Path.cwd())
    try:
        futures = {node["NodeID"]: _file_view_on(node).remote(*paths) for node in nodes}
        own_view = _file_view(*paths)
        responding = []
        for node in nodes:
            try:
                view = ray.get(futures[node["NodeID"]])
            except (NodeDiedError, TaskUnschedulableError, WorkerCrashedError):
                notify(f"node {node['NodeManagerAddress']} does not answer, so nothing is converted there")
                continue
            responding.append(node)
            for what, path in zip(("token", "source", "directory"), (str(repository), *paths[1:]), strict=True):
                if view[what] != own_view[what]:
                    raise UsageError(
                        f"--ray: node {node['NodeManagerAddress']} does not see the same {path} as this machine; put"
                        " the checkpoints, the repository and the working directory on a file system that all nodes"
                        " share"
                    )
            if view["version"] != own_view["version"]:
                raise UsageError(
                    f"--ray: node {node['NodeManagerAddress']} has bf16kit {view['version']}, and this machine"
                    f" {own_view['version']}; install the same version on all nodes"
                )
        return responding
    finally:
        token.unlink(missing_ok=True)


def _file_view_on(node: dict[str, Any]) -> Any:
    where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    return ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=where)(_file_view)


def _file_view(token: str, source: str, directory: str) -> dict[str, str]:
    """Return what a machine sees: equal on all machines that see the same files."""
    try:
        token_text = Path(token).read_text()
    except OSError:
        token_text = ""
    try:
        names = sorted(f"{path.name} {path.stat().st_size}" for path in Path(source).iterdir())
        listing_digest = hashlib.sha256("\n".join(names).encode()).hexdigest()
    except OSError:
        listing_digest = ""
    return {
        "token": token_text,
        "source": listing_digest,
        "directory": str(Path(directory).is_dir()),
        "version": bf16kit.__version__,
    }
