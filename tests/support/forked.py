"""Runs ``bf16-convert`` many times, in processes forked from one Python process that has imported the slow modules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from converting import Outcome

# Nothing is computed before the fork: a library that has computed has threads, which do not exist after the fork.
_SERVER = """
import importlib, json, os, sys
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
from converter.cli import run

for request in sys.stdin:
    arguments, out, err = json.loads(request)
    child = os.fork()
    if child == 0:
        for descriptor, path in ((0, os.devnull), (1, out), (2, err)):
            os.dup2(os.open(path, os.O_RDWR), descriptor)
        code = run(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


class Forked:
    """Runs command lines one after another, each in its own process."""

    def __init__(self, process: subprocess.Popen[str], directory: Path) -> None:
        self._process = process
        self._output_files = directory / "out", directory / "err"

    def __call__(self, *arguments: str | Path) -> Outcome:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        for path in self._output_files:
            path.write_bytes(b"")
        print(json.dumps([[*map(str, arguments)], *map(str, self._output_files)]), file=self._process.stdin, flush=True)
        code = int(self._process.stdout.readline())
        out, err = (path.read_text("utf-8") for path in self._output_files)
        return Outcome(code, out, err)


@contextmanager
def forked(
    python: Path = Path(sys.executable), modules: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[Forked]:
    """Yield a runner of ``bf16-convert`` for ``python``, which has already imported ``modules``."""
    with tempfile.TemporaryDirectory(prefix="bf16kit-forked-") as directory:
        process = subprocess.Popen(
            [str(python), "-c", _SERVER, json.dumps(list(modules))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ if environment is None else environment,
        )
        try:
            yield Forked(process, Path(directory))
        finally:
            process.communicate(timeout=60)
