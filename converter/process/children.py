"""Starts this program again as a child: the same code, and nothing from the working directory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]


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
