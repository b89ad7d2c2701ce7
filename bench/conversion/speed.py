"""How long converting MiniLM takes, imports and all, on two processors."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from bench.core import models
from bench.core.results import Measurement, Result
from bench.core.workspace import Workspace

_AT_MOST = 25.0  # seconds
_RUNS, _QUICK = 5, 1
_CPUS = 2


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """The median of several conversions, each in a process of its own; ONNX and TorchScript, 200 real sentences."""
    models.demo_on_path()
    import minilm

    workspace.root.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-c",
        "from bf16kit.converter.cli import main; main()",
        "checkpoint",
        str(minilm.checkpoint()),
    ]
    command += ["--out", str(workspace.root / "conversion_speed" / "1"), "--force", "--samples", "minilm:calibration"]
    command += ["--format", "onnx", "--format", "torchscript"]
    seconds = [_seconds(command) for _ in range(_QUICK if quick else _RUNS)]
    return Result(
        "conversion_speed",
        (
            Measurement("bf16-convert", median(seconds), "s", at_most=_AT_MOST),
            Measurement("the fastest", min(seconds), "s"),
        ),
        settings={"model": "all-MiniLM-L6-v2", "runs": len(seconds), "processors": _CPUS, "formats": "all"},
    )


def _seconds(command: list[str]) -> float:
    cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))[:_CPUS]))
    pinned = ["taskset", "--cpu-list", cpus, *command]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(models.ROOT), str(models.DEMO)])}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # a user's Python keeps the bytecode of what it imports
    with tempfile.TemporaryFile("w+") as log:
        start = time.perf_counter()
        code = subprocess.run(
            pinned,
            cwd=Path(tempfile.gettempdir()),
            env=environment,
            stdout=log,
            stderr=log,
            check=False,
        ).returncode
        seconds = time.perf_counter() - start
        if code:
            log.seek(0)
            raise RuntimeError(f"the conversion failed with exit code {code}:\n{log.read()[-4000:]}")
    return seconds
