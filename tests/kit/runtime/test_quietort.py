"""ONNX Runtime writes no files that the user did not ask for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_nothing_is_written_to_the_home_directory(tmp_path: Path) -> None:
    """With its default settings, ONNX Runtime's telemetry writes a device id to ~/.cache at import."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ORT_", "XDG_"))}
    done = subprocess.run(
        [sys.executable, "-c", "import bf16kit.runtime.ort.onnx"],
        env=environment | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.rglob("*")) == []
