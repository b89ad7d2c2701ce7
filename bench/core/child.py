"""Processes that a benchmark asks something, again and again: a line of JSON each way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_ROOT = Path(__file__).parents[2]


class Child:
    """A process that answers each line with one; the end of its input ends it. Its stderr goes to ``log``."""

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str] | None = None, log: Path | None = None
    ) -> None:
        self._log = log
        with log.open("a") if log else nullcontext() as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=environment,
                cwd=_ROOT,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, request: Any) -> None:
        """Ask without waiting for the answer. A process that has ended is noticed by :meth:`answer`."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def answer(self) -> Any:
        """The next answer. Raises RuntimeError where the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            why = f":\n{self._log.read_text()[-2000:]}" if self._log else "; its error is above"
            raise RuntimeError(f"{self._process.args!r} ended with exit code {self._process.wait()}{why}")
        return json.loads(line)

    def ask(self, request: Any) -> Any:
        """Both."""
        self.send(request)
        return self.answer()

    def close(self) -> None:
        """End it, and wait for that: its processor time then counts as ours."""
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._process.kill()
        self.close()


def module(name: str, *arguments: str) -> list[str]:
    """The command that runs the module ``name`` with this Python."""
    return [sys.executable, "-m", name, *arguments]


def answer_all(act: Callable[[Any], Any]) -> None:
    """Inside the process: answer each request with what ``act`` makes of it. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(act(json.loads(line))), file=answers, flush=True)
