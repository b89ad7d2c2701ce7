"""How this program starts itself again: the same code, and nothing from the working directory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def command(module: str, *arguments: str) -> list[str]:
    """The command line that runs ``module`` of this program.

    ``-P``: with ``-m`` alone Python puts the working directory first on its path, and a ``click.py`` among somebody's
    checkpoints would be run.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def variables() -> dict[str, str]:
    """The environment to run it in: it finds the code that this process runs, installed or not."""
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}
