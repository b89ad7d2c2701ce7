"""What a piece of a program takes of memory at its peak, measured in a process where nothing else happens."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


def measured_alone(program: str, *arguments: str) -> str:
    """What the Python ``program`` prints, run by itself with this project and its tests' builders on its path."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(ROOT)])}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def anonymous() -> int:
    """Bytes of this process' memory that belong to no file: what the system cannot take back."""
    return _field("RssAnon")


@dataclass
class Peak:
    bytes: int = 0


@contextmanager
def peak_anonymous() -> Iterator[Peak]:
    """The largest :func:`anonymous` within the block, seen every millisecond: the kernel keeps no peak of it."""
    peak, done = Peak(anonymous()), threading.Event()

    def watch() -> None:
        while not done.wait(1e-3):
            peak.bytes = max(peak.bytes, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()
        peak.bytes = max(peak.bytes, anonymous())


def _field(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {name}")
