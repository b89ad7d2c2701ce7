"""Finds the Python that has TensorFlow: this one, or the one that an environment variable names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from bf16kit.messages.errors import UsageError
from bf16kit.messages.wording import brief

VARIABLE = "BF16KIT_TENSORFLOW_PYTHON"
PREPARE = (
    "python3 -m venv tensorflow-env",
    "tensorflow-env/bin/pip install tensorflow-cpu==2.21.0 tf2onnx==1.17.0",
    f"export {VARIABLE}=$PWD/tensorflow-env/bin/python",
)
_SECONDS = 60
_TENSORFLOWS = ("tensorflow", "tensorflow-cpu", "tensorflow-intel", "tensorflow-aarch64", "tf-nightly")
# Run by the other Python, of any version from 3.8 on; imports only Python's own modules.
_VERSIONS_SCRIPT = f"""
import json, sys
from importlib.metadata import PackageNotFoundError, version
def of(*names):
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            pass
print(json.dumps({{"python": sys.version.split()[0], "tensorflow": of{_TENSORFLOWS!r}, "tf2onnx": of("tf2onnx"),
                  "keras": of("keras"), "numpy": of("numpy"), "protobuf": of("protobuf")}}))
"""


@dataclass(frozen=True, slots=True)
class Environment:
    """A Python, and the versions of its packages (None: not installed). ``named``: by the environment variable."""

    python: Path
    versions: dict[str, str | None]
    named: bool

    @property
    def missing(self) -> tuple[str, ...]:
        """The packages that it lacks."""
        return tuple(name for name in ("tensorflow", "tf2onnx") if self.versions.get(name) is None)


def find() -> Environment:
    """Return the Python to use; ``missing`` lists what it lacks. Does not import TensorFlow.

    Raises :class:`UsageError` when the one that :data:`VARIABLE` names does not exist or does not run.
    """
    named = os.environ.get(VARIABLE)
    python = Path(named) if named else Path(sys.executable)
    if named and not python.is_file():
        raise UsageError(f"{VARIABLE}={named}: no such file; name the python of an environment with TensorFlow")
    return Environment(python, _versions(python), bool(named))


def require() -> Environment:
    """Return :func:`find`'s result; :class:`UsageError` with the commands that prepare one if something is missing."""
    found = find()
    if found.missing:
        raise UsageError(
            f"a TensorFlow model is translated by TensorFlow and tf2onnx, and {found.python} lacks"
            f" {' and '.join(found.missing)}; prepare an environment of its own:\n  " + "\n  ".join(PREPARE)
        )
    return found


def _versions(python: Path) -> dict[str, str | None]:
    try:
        finished = subprocess.run(
            [str(python), "-I", "-c", _VERSIONS_SCRIPT],  # before 3.11 only -I keeps the working directory off the path
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            stdin=subprocess.DEVNULL,
            env=variables(),
        )
        found = json.loads(finished.stdout) if finished.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{python}: cannot be run: {brief(error)}") from None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UsageError(
            f"{python}: does not run as a Python: {brief(finished.stderr.strip() or finished.stdout.strip())}"
        )
    return {str(name): None if value is None else str(value) for name, value in found.items()}


def variables() -> dict[str, str]:
    """Return the environment variables for a program of that Python.

    It imports only its own packages: not from this program's path, the working directory or the user's site. A fixed
    hash seed makes sets iterate in the same order on every run, which tf2onnx's names depend on.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    isolation = ("PYTHONSAFEPATH", "PYTHONNOUSERSITE", "PYTHONDONTWRITEBYTECODE")
    return {**own, **dict.fromkeys(isolation, "1"), "PYTHONHASHSEED": "0"}
