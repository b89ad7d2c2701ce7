"""Runs ``bf16-convert`` in processes that it can kill. They start at once: they are forked after all imports."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

_SERVER = """
import gc, importlib, json, os, select, signal, sys, time
import jinja2, matplotlib.backends.backend_svg  # a report needs them
for name in ("converter.convert", "converter.restore", "converter.read.onnx_file", "runtime.ort.onnx"):
    importlib.import_module(f"bf16kit.{name}")
from bf16kit.converter.cli import run
gc.freeze()  # the children share what none of their collections visits

TOUCHES = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.listdir", "os.scandir", "shutil.rmtree"}
PROGRAM = tuple(path for path in (sys.prefix, sys.base_prefix, *sys.path) if path)  # imports are not what is counted
touched = 0

def touch(at, event, given):
    global touched
    if event not in TOUCHES or str(given[0]).startswith(PROGRAM):
        return
    touched += 1
    if touched == at:
        os.kill(os.getpid(), signal.SIGKILL)

def one(arguments, line, after, at):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        sys.stdout = sys.stderr = os.fdopen(writing, "w", buffering=1)
        sys.addaudithook(lambda event, given: touch(at, event, given))
        code = run(arguments)
        print("touched", touched)
        sys.stdout.flush()
        os._exit(code)
    os.close(writing)
    said, killed, times = b"", False, []
    while True:
        if line is not None and not killed and line.encode() in said:
            time.sleep(after)
            os.kill(child, signal.SIGKILL)
            killed = True
        piece = os.read(reading, 65536)
        if not piece:
            break
        said += piece
        times += [time.monotonic()] * (said.count(b"bf16-convert: ") - len(times))
    times.append(time.monotonic())
    os.close(reading)
    _, status = os.waitpid(child, 0)
    return {"code": os.waitstatus_to_exitcode(status), "said": said.decode(errors="replace"), "times": times}

for request in sys.stdin:
    print(json.dumps(one(*json.loads(request))), flush=True)
"""


@dataclass(frozen=True)
class ProcessResult:
    """How a run ended: its exit code, or minus the number of the signal that killed it, and its output."""

    code: int
    said: str
    times: list[float]  # when each line of its progress was written, and when it ended

    def touches(self) -> int:
        """Return how many files or directories it opened, listed, made, renamed or removed, repetitions included."""
        return int(re.findall(r"^touched (\d+)$", self.said, re.MULTILINE)[-1])

    def steps(self) -> list[tuple[str, float]]:
        """Return the lines of its progress without names, each with the seconds until the next line or the end."""
        lines = re.findall(r"^bf16-convert: \w+(?: the \w+ of \w+)?", self.said, re.MULTILINE)
        return [(line, after - at) for line, (at, after) in zip(lines, pairwise(self.times), strict=True)]


class Runner:
    """Runs command lines one after another, each in its own process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, *arguments: str | Path) -> ProcessResult:
        """Run the command to its end."""
        return self._ask(arguments, None, 0.0, None)

    def kill(self, *arguments: str | Path, line: str, after: float) -> ProcessResult:
        """Kill the command ``after`` seconds after it wrote ``line``. It may have ended by then."""
        return self._ask(arguments, line, after, None)

    def kill_at(self, *arguments: str | Path, touch: int) -> ProcessResult:
        """Kill the command just before it opens, lists, makes, renames or removes something, the ``touch``-th time."""
        return self._ask(arguments, None, 0.0, touch)

    def _ask(
        self, arguments: tuple[str | Path, ...], line: str | None, after: float, touch: int | None
    ) -> ProcessResult:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([[*map(str, arguments)], line, after, touch]), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return ProcessResult(**answer)


@contextmanager
def runner() -> Iterator[Runner]:
    """Yield a runner, whose process ends with the context."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
    )
    try:
        yield Runner(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(timeout=60)
        assert process.stdout is not None
        process.stdout.close()


def files(directory: Path) -> dict[str, bytes]:
    """Return the content of every file in a directory, by name."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}
