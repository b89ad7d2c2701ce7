"""``bf16-convert`` as users run it: what a command line prints, and which files it leaves."""

import io
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from bf16kit.converter.cli import run

SUPPORT = Path(__file__).parent
MLP = ("--model", "architectures:Mlp", "--input", "x:float32:batch,16")
ONNX_ONLY = ("--format", "onnx", "--no-report")  # the cheapest conversion, for tests of something else


@dataclass(frozen=True)
class Outcome:
    """How one command ended."""

    code: int
    out: str
    err: str

    def published(self) -> Self:
        """Return itself after asserting that the command succeeded."""
        assert self.code == 0, self.err
        return self

    def refused(self, code: int, *expected_texts: str) -> Self:
        """Return itself after asserting that the command ended with ``code`` and at least one error message.

        The standard error contains each of ``expected_texts``, and no traceback.
        """
        assert self.code == code, (self.code, self.err)
        assert "Traceback" not in self.err
        assert "this is a bug" not in self.err, self.err
        assert self.err.count("error: ") + self.err.count("Error: ") >= 1, self.err
        for text in expected_texts:
            assert text in self.err, self.err
        return self


Cli = Callable[..., Outcome]


def run_command(*arguments: str | Path) -> Outcome:
    """Run ``bf16-convert`` in this process."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = run([str(argument) for argument in arguments])
    return Outcome(code, out.getvalue(), err.getvalue())


def process(*arguments: str | Path, cwd: Path | None = None) -> Outcome:
    """Run ``bf16-convert`` in its own process."""
    command = [str(Path(sys.executable).with_name("bf16-convert")), *map(str, arguments)]
    # SUPPORT is for --model architectures:…; the caller's path, which may have a checkout's own code, comes first
    path = [os.environ.get("PYTHONPATH", ""), str(SUPPORT)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=120)
    return Outcome(done.returncode, done.stdout, done.stderr)


def tree(path: Path) -> Sequence[str]:
    """Return the paths of everything below ``path``, including hidden files."""
    return sorted(str(found.relative_to(path)) for found in path.rglob("*"))
