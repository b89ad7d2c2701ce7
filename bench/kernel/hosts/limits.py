"""What the processor can do: how long a piece of work would take at the full rate of its arithmetic in bf16."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from bench.core.child import Child
from bench.kernel.hosts import Absent, Feeds, Prepare, Run, Subject
from bench.kernel.sides import THREADS

_PASSES = 5
_SOURCE = Path(__file__).with_name("arithmetic.cpp")
_COMPILERS = ("c++", "g++", "clang++")


def open_side(_: Mapping[str, str], __: Subject) -> Prepare:
    """Absent where there is no compiler, or the processor has no such arithmetic."""
    with tempfile.TemporaryDirectory(prefix="bf16kit-limits-") as directory:  # a program that runs stays
        program = Child([str(_compiled(Path(directory))), str(THREADS)])
    atexit.register(program.close)  # waited for, its time is ours and not another program's
    if not program.ask(1):
        raise Absent("this processor has no dot products of bf16")

    def prepare(_: Feeds, operations: float) -> Run:
        def run() -> float:
            """Seconds at the rate of the median of a few passes."""
            return float(operations / median(program.ask(1) for _ in range(_PASSES)) / 1e9)

        return run

    return prepare


def _compiled(directory: Path) -> Path:
    """The program for this processor, in ``directory``."""
    compiler = shutil.which(os.environ.get("CXX", "")) or next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise Absent(f"no C++ compiler: none of {', '.join(_COMPILERS)} is on PATH; install g++, or set CXX")
    program = directory / "arithmetic"
    command = [compiler, "-std=c++17", "-O3", "-march=native", "-pthread", str(_SOURCE), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Absent(f"{compiler} cannot compile {_SOURCE.name}: {done.stderr.strip()[:400]}")
    return program
