"""The peers' own environments, under ``build/peers``: their pins and ours do not go together."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from bench.core.models import ROOT

_HOME = ROOT / "build" / "peers"
#: What is installed. With a newer uvloop MLServer's workers find no event loop and end.
_PACKAGES = {"mlserver": ("mlserver==1.7.1", "uvloop<0.22"), "pytriton": ("nvidia-pytriton==0.7.0",)}


def interpreter(peer: str) -> Path:
    """The Python of ``peer``'s environment, made when first asked for. Raises RuntimeError where that cannot be."""
    home = _HOME / peer
    python = home / "bin" / "python"
    stamp = home / ".installed"
    if not stamp.exists():
        shutil.rmtree(home, ignore_errors=True)
        _run(_base(peer), "-m", "venv", str(home))
        runtime = f"onnxruntime=={metadata.version('onnxruntime')}"  # the same for all
        _run(str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", *_PACKAGES[peer], runtime)
        stamp.touch()
    return python


def versions() -> dict[str, str]:
    """What is installed of each peer. Raises RuntimeError where one cannot be."""
    return {peer: _version(peer) for peer in _PACKAGES}


def _version(peer: str) -> str:
    package = _PACKAGES[peer][0].partition("==")[0]
    code = f"from importlib import metadata; print(metadata.version({package!r}))"
    return subprocess.run([interpreter(peer), "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def _base(peer: str) -> str:
    """PyTriton's Triton runs Python in a shared library, the system's, which must be the interpreter's own version."""
    system = "/usr/bin/python3"
    return system if peer == "pytriton" and os.access(system, os.X_OK) else sys.executable


def _run(*command: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} … failed:\n{done.stdout[-2000:]}")
