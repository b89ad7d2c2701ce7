"""A short run of the C++ kernel's own property test, without ONNX Runtime.

``make test-kernel`` runs ten thousand cases under sanitizers.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.long  # compiles the kernel's own tests

_ROOT = Path(__file__).resolve().parents[2]


def test_the_kernel_agrees_with_float64_and_with_itself() -> None:
    """Run 500 random cases. A failure names the seed and the case; ``run.sh --seed S --only N`` repeats it."""
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(shlex.split(compiler)[0]) is None:
        pytest.skip(f"no C++ compiler: {compiler} is not on PATH (Debian: apt-get install g++)")
    command = ["kernels/tests/run.sh", "--cases", "500"]
    done = subprocess.run(command, cwd=_ROOT, env={**os.environ, "CXX": compiler}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("ok: 500 cases"), done.stdout
