"""The read bandwidth of this machine, measured by ``native/bandwidth.cpp`` in a process that waits for its turns."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parent / "native" / "bandwidth.cpp"
_BYTES = 512 << 20  # 16 times the last-level cache of the machine at hand
_COMPILERS = ("c++", "g++", "clang++")


class NoCompiler(Exception):
    """There is none, or it cannot compile the program."""


@dataclass(frozen=True, slots=True)
class Passes:
    """Of several passes over the memory, GB/s."""

    best: float
    median: float


class Bandwidth:
    """The running program; ``how`` says what it found to be the fastest way to read."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        streams, ahead = self._line().split()
        self.how = f"{streams} streams per thread, prefetching {ahead} bytes ahead"

    def measure(self, passes: int) -> Passes:
        """The bandwidth of the next ``passes`` passes."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{passes}\n")
        self._process.stdin.flush()
        best, median = self._line().split()
        return Passes(float(best), float(median))

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the bandwidth program ended with exit code {self._process.wait()}")
        return line


@contextmanager
def bandwidth(directory: Path, threads: int) -> Iterator[Bandwidth]:
    """The program, compiled and running on a file in ``directory``. Raises :class:`NoCompiler`."""
    program, blob = _compiled(directory), directory / "bandwidth.blob"
    command = [str(program), str(blob), str(_BYTES), str(threads)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Bandwidth(process)
    finally:
        process.communicate()  # the end of its input ends it
        blob.unlink(missing_ok=True)


def _compiled(directory: Path) -> Path:
    compiler = shutil.which(os.environ.get("CXX", "")) or next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise NoCompiler(f"no C++ compiler: none of {', '.join(_COMPILERS)} is on PATH; install g++, or set CXX")
    directory.mkdir(parents=True, exist_ok=True)
    program = directory / "bandwidth"
    command = [compiler, "-std=c++17", "-O3", "-march=native", "-pthread", str(SOURCE), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoCompiler(f"{compiler} cannot compile {SOURCE.name}: {done.stderr.strip()[:400]}")
    return program
