"""TorchScript files with code of a test's own, and a process that loads them, which may crash."""

from __future__ import annotations

import subprocess
import sys
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

_LOAD_EACH = """
import sys, warnings
import torch
warnings.simplefilter("ignore")
for path in sys.argv[1:]:
    print(path, flush=True)
    try:
        module = torch.jit.load(path)
        torch._C._jit_pass_inline(module.graph)
    except RuntimeError:
        pass  # torch may reject it, as long as it survives
"""


def with_code(path: Path, code: str, use: str = "__torch__.f(input)") -> Path:
    """Write to ``path`` a module that evaluates the expression ``use``; ``code`` is that of ``__torch__``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates TorchScript
        saved: Any = torch.jit.script(torch.nn.ReLU())
        torch.jit.save(saved, path)
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            archive.writestr(name, data.replace(b"    _0 = ", f"    _1 = {use}\n    _0 = ".encode()))
        top = next(name for name in records if "/code/" in name).partition("/code/")[0]
        archive.writestr(f"{top}/code/__torch__.py", code)
    return path


def first_crash(paths: Sequence[Path]) -> str:
    """Load and inline each file with torch, in one process. Return the path at which the process crashed, else ""."""
    command = [sys.executable, "-c", _LOAD_EACH, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout.split()[-1]
