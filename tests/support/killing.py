"""``bf16-convert`` in processes that are killed: forked from one that has imported everything, they start at once."""

from __future__ import annotations

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
import importlib, json, os, select, signal, sys, time
for name in ("converter.pipeline", "converter.restore", "converter.sources.onnx_file", "bf16kit.runtime.onnx"):
    importlib.import_module(name)
from converter.cli import run

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
class Ended:
    """How a run ended: its exit code, or minus the signal it died of, and what it said until then, and when."""

    code: int
    said: str
    times: list[float]  # of each line by which it says what it does, and of its end

    def touches(self) -> int:
        """How often it opened, made, renamed or removed something."""
        return int(re.findall(r"^touched (\d+)$", self.said, re.MULTILINE)[-1])

    def steps(self) -> list[tuple[str, float]]:
        """Those lines, but for the names in them, and for how many seconds each was the last."""
        lines = re.findall(r"^bf16-convert: \w+(?: the \w+ of \w+)?", self.said, re.MULTILINE)
        return [(line, after - at) for line, (at, after) in zip(lines, pairwise(self.times), strict=True)]


class Runner:
    """Runs command lines one after another, each in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, *arguments: str | Path) -> Ended:
        """To its end."""
        return self._ask(arguments, None, 0.0, None)

    def kill(self, *arguments: str | Path, line: str, after: float) -> Ended:
        """Killed ``after`` so many seconds when it had said ``line``; it may have come to its end by then."""
        return self._ask(arguments, line, after, None)

    def kill_at(self, *arguments: str | Path, touch: int) -> Ended:
        """Killed just before it opens, makes, renames or removes something for the time ``touch``."""
        return self._ask(arguments, None, 0.0, touch)

    def _ask(self, arguments: tuple[str | Path, ...], line: str | None, after: float, touch: int | None) -> Ended:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([[*map(str, arguments)], line, after, touch]), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return Ended(**answer)


@contextmanager
def runner() -> Iterator[Runner]:
    """A process to run from, for as long as the context lasts."""
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
    """Every file of a directory, by name."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}
