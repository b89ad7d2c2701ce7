"""Small programs in C++ that measure the machine itself: compiled here, asked line by line, ended with their input."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

_COMPILERS = ("c++", "g++", "clang++")


class NoCompiler(Exception):
    """There is none, or it cannot compile the program."""


class Program:
    """A running one. ``greeting`` is the line that it begins with."""

    def __init__(self, name: str, directory: Path, *arguments: str) -> None:
        self._command = [str(_compiled(name, directory)), *arguments]
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.greeting = self._line()

    def ask(self, question: str) -> list[float]:
        """The numbers that it answers ``question`` with."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{question}\n")
        self._process.stdin.flush()
        return [float(word) for word in self._line().split()]

    def close(self) -> None:
        """End it."""
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._command[0]} ended with exit code {self._process.wait()}")
        return line.strip()


def _compiled(name: str, directory: Path) -> Path:
    """``name``.cpp for this processor, in ``directory``. Raises :class:`NoCompiler`."""
    compiler = shutil.which(os.environ.get("CXX", "")) or next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise NoCompiler(f"no C++ compiler: none of {', '.join(_COMPILERS)} is on PATH; install g++, or set CXX")
    directory.mkdir(parents=True, exist_ok=True)
    source, program = Path(__file__).with_name(f"{name}.cpp"), directory / name
    command = [compiler, "-std=c++17", "-O3", "-march=native", "-pthread", str(source), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoCompiler(f"{compiler} cannot compile {source.name}: {done.stderr.strip()[:400]}")
    return program
