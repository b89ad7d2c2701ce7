"""This program: the versions of the packages it consists of, and how to start it again as a child process."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable
from pathlib import Path

_ALWAYS = ("bf16kit", "ml_dtypes", "numpy", "onnx", "onnx-ir", "onnxruntime", "onnxruntime-gpu", "safetensors")
_ROOT = Path(__file__).parents[3]


def versions(used: Iterable[str] = ()) -> dict[str, str]:
    """Return the versions of Python, of the packages behind every artifact, and of those ``used`` to read its source.

    With the same versions, the same input gives the same bytes. ``used`` comes from the source, never from
    ``sys.modules``: other imports of the process must not change the result.
    """
    found = {name: version_of(name) for name in (*_ALWAYS, *used)}
    return {"python": platform.python_version()} | {name: v for name, v in found.items() if v is not None}


def onnxruntime() -> str | None:
    """Return the version of the installed ONNX Runtime, for CPUs or GPUs; None if there is none."""
    return version_of("onnxruntime") or version_of("onnxruntime-gpu")


def version_of(name: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # a child process, which asks for none, starts faster

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs ``module`` of this program.

    ``-P`` is needed: with ``-m`` alone, Python puts the working directory first on its path, and would run a
    ``click.py`` that lies among the user's checkpoints.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def environment() -> dict[str, str]:
    """Return the environment for the child, with which it finds the code that this process runs, installed or not."""
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}
