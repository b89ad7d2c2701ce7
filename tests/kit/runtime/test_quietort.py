"""What ONNX Runtime does behind a user's back, and that it does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_nothing_is_written_to_the_home_directory(tmp_path: Path) -> None:
    """ONNX Runtime's telemetry leaves a device id in ~/.cache when it is imported as it comes."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ORT_", "XDG_"))}
    done = subprocess.run(
        [sys.executable, "-c", "import bf16kit.runtime.onnx"],
        env=environment | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.rglob("*")) == []
