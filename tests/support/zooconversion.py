"""Converting one of the tiny transformers models in a process of its own, which imports this by name."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path

import hfzoo
import torch

from converter.cli import run
from converter.process.quiet import quiet


@dataclass(frozen=True)
class Converted:
    """How the conversion of one model ended, and where the model and the artifact are."""

    code: int
    out: str
    err: str
    directory: Path
    target: Path


def convert(name: str, root: Path) -> Converted:
    torch.set_num_threads(1)
    directory, target = root / name, root / "repository" / name / "1"
    out, err = io.StringIO(), io.StringIO()
    arguments = ("--format", "onnx", "--profile", "cpu", "--no-report")
    with quiet():
        hfzoo.save(name, directory)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(["checkpoint", str(directory), "--out", str(target), *arguments])
    return Converted(code, out.getvalue(), err.getvalue(), directory, target)
