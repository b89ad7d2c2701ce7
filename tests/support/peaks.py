"""The peak memory of a piece of a program, measured in a process that does nothing else."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
AT_EXIT = "\nimport gc; gc.freeze()"  # or the interpreter visits all objects once more: of torch's, that takes 1.5 s


def measured_alone(program: str, *arguments: str) -> str:
    """Run the Python ``program`` in a process with this project and tests/support on its path; return its output."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(ROOT)])}
    command = [sys.executable, "-c", program + AT_EXIT, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def anonymous() -> int:
    """Return the bytes of this process' anonymous memory, which the system cannot reclaim."""
    return _field("RssAnon")


def resident() -> int:
    """Return the bytes of this process' memory that are resident, mapped files included."""
    return _field("VmRSS")


@dataclass
class Peak:
    bytes: int = 0


@contextmanager
def peak_anonymous() -> Iterator[Peak]:
    """Yield the peak of :func:`anonymous` in the block, sampled every millisecond: the kernel does not record it."""
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
