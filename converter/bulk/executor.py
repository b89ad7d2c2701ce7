"""Runs the conversions of a worklist as local processes; :mod:`converter.bulk.onray` runs them on a Ray cluster."""

from __future__ import annotations

import signal
import subprocess
import threading
from pathlib import Path
from typing import Protocol

from converter.process import children


class Process(Protocol):
    """A running conversion."""

    def wait(self) -> int:
        """Wait and return its exit code, as :class:`subprocess.Popen` does: below 0 if a signal ended it."""
        ...


class Executor(Protocol):
    """Starts conversions, and can stop all of them. Once ``stopped``, no more are to be started."""

    stopped: bool

    def start(self, command: list[str], log: Path) -> Process:
        """Run ``command`` with its output going to ``log``. Called on many threads."""
        ...

    def stop(self) -> None:
        """Stop every conversion as Ctrl-C would."""
        ...


class LocalExecutor:
    """Runs conversions as processes of this machine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self.stopped = False

    def start(self, command: list[str], log: Path) -> Process:
        with self._lock:
            process = start_process(command, log)
            self._running.add(process)
            if self.stopped:
                process.send_signal(signal.SIGINT)
        return process

    def stop(self) -> None:
        """Send SIGINT to every process, which takes it for Ctrl-C; a terminal sends that to all of them anyway."""
        with self._lock:
            self.stopped = True
            for process in self._running:
                if process.poll() is None:
                    process.send_signal(signal.SIGINT)


def start_process(command: list[str], log: Path, directory: Path | None = None) -> subprocess.Popen[bytes]:
    """Start ``command``, in ``directory`` if given, with its output going to ``log``."""
    with log.open("wb") as file:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=children.environment(),
            cwd=directory,
        )
