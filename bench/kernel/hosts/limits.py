"""What the machine can do: how long a piece of work would take at the full rate of one of its parts."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from bench.kernel.hosts import Absent, Feeds, Prepare, Prepared, Subject, Work
from bench.kernel.native import NoCompiler, Program
from bench.kernel.sides import THREADS

_PASSES = 5
_BYTES = 512 << 20  # no cache holds them


def open_side(options: Mapping[str, str], _: Subject) -> Prepare:
    """Of ``fma`` and ``dpbf16`` arithmetic, and of ``read``: memory."""
    part = options["of"]
    directory = Path(tempfile.mkdtemp(prefix="bf16kit-limits-"))
    try:
        program = _reading(directory) if part == "read" else Program("arithmetic", directory, str(THREADS))
    except NoCompiler as error:
        raise Absent(str(error)) from error
    finally:
        shutil.rmtree(directory, ignore_errors=True)  # a program that runs, and a file that it has mapped, stay
    if part != "read" and part not in program.greeting.split():
        raise Absent(f"this processor has no {part}")
    atexit.register(program.close)  # waited for, its time is ours and not another program's
    question = str(_PASSES) if part == "read" else part

    def prepare(_: Feeds, work: Work) -> Prepared:
        amount = work.bytes if part == "read" else work.operations

        def run() -> float:
            """Seconds at the rate of the median of a few passes."""
            rate = program.ask(question)[1] if part == "read" else median(program.ask(part)[0] for _ in range(_PASSES))
            return amount / rate / 1e9

        return Prepared(run, measures=True)

    return prepare


def _reading(directory: Path) -> Program:
    return Program("bandwidth", directory, str(directory / "blob"), str(_BYTES), str(THREADS))
