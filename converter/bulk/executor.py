"""Where the conversions of a worklist run: here, as processes; :mod:`converter.bulk.onray` has another place."""

from __future__ import annotations

import signal
import subprocess
import threading
from pathlib import Path
from typing import Protocol

from converter.process import children


class Process(Protocol):
    """A conversion that runs somewhere."""

    def wait(self) -> int:
        """Its exit code, as of :class:`subprocess.Popen`: below 0 where a signal ended it."""
        ...


class Executor(Protocol):
    """Starts conversions, and has all of them stop. ``stopped``: none more is to be started."""

    stopped: bool

    def start(self, command: list[str], log: Path) -> Process:
        """Run ``command`` with all that it says going to ``log``. Called on many threads."""
        ...

    def stop(self) -> None:
        """Each is to end as by Ctrl-C."""
        ...


class Here:
    """Processes of this machine."""

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
        """Each takes SIGINT for Ctrl-C, which a terminal sends to all of them anyway."""
        with self._lock:
            self.stopped = True
            for process in self._running:
                if process.poll() is None:
                    process.send_signal(signal.SIGINT)


def start_process(command: list[str], log: Path, directory: Path | None = None) -> subprocess.Popen[bytes]:
    """``command`` started, in ``directory`` where that is given, with all that it says going to ``log``."""
    with log.open("wb") as file:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=children.variables(),
            cwd=directory,
        )
