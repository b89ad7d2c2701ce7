"""TorchScript files with code of a test's own, and a process that loads them, which may crash."""

from __future__ import annotations

import io
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from exportedfiles import packed, records

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
    saved = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates TorchScript
        script: Any = torch.jit.script(torch.nn.ReLU())
        torch.jit.save(script, saved)
    first = b"    _0 = "
    found = {
        name: data.replace(first, f"    _1 = {use}\n".encode() + first)
        for name, data in records(saved.getvalue()).items()
    }
    path.write_bytes(packed({**found, "code/__torch__.py": code.encode()}))
    return path


def doubling(levels: int) -> str:
    """Return the code of functions ``f0`` to ``f{levels}``, each of which calls the one before twice."""
    return "def f0(x: Tensor) -> Tensor:\n  return torch.add(x, 1)\n" + "".join(
        f"def f{k}(x: Tensor) -> Tensor:\n  return __torch__.f{k - 1}(__torch__.f{k - 1}(x))\n"
        for k in range(1, levels + 1)
    )


def first_crash(paths: Sequence[Path]) -> str:
    """Load and inline each file with torch, in one process. Return the path at which the process crashed, else ""."""
    command = [sys.executable, "-c", _LOAD_EACH, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout.split()[-1]
