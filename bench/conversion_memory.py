"""How much memory converting MiniLM takes at its peak, beyond what its imports take.

The peak is that of resident memory, mapped pages of the checkpoint included. The imports are measured in a process that
imports every module the conversion had imported, and does no more.
"""

from __future__ import annotations

import os
import subprocess
import sys
from statistics import median

from bench import models
from bench.results import Measurement, Result
from bench.workspace import Workspace

_AT_MOST = 3.0
_RUNS, _QUICK = 3, 1
_MB = 1e6


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """The median peak of several conversions, as a multiple of the checkpoint."""
    models.demo_on_path()
    import minilm

    runs = _QUICK if quick else _RUNS
    source = minilm.checkpoint()
    checkpoint = (source / "model.safetensors").stat().st_size
    workspace.root.mkdir(parents=True, exist_ok=True)
    modules = workspace.root / "conversion_memory.modules"
    target = workspace.root / "conversion_memory" / "1"
    convert = ["run", str(modules), "checkpoint", str(source), "--out", str(target), "--force"]
    peaks = [_peak(*convert, "--samples", "minilm:calibration") for _ in range(runs)]
    imports = median(_peak("import", str(modules)) for _ in range(runs))
    beyond = median(peaks) - imports
    return Result(
        "conversion_memory",
        (
            Measurement("peak beyond the imports ÷ checkpoint", beyond / checkpoint, at_most=_AT_MOST),
            Measurement("peak", median(peaks) / _MB, "MB"),
            Measurement("largest peak", max(peaks) / _MB, "MB"),
            Measurement("imports", imports / _MB, "MB"),
            Measurement("fp32 checkpoint", checkpoint / _MB, "MB"),
        ),
        settings={"model": "all-MiniLM-L6-v2", "runs": runs, "samples": "200 real sentences", "formats": "all"},
    )


def _peak(*arguments: str) -> int:
    """Peak resident memory, in bytes, of ``python -m bench.peak`` with ``arguments``."""
    environment = {**os.environ, "PYTHONPATH": str(models.DEMO)}
    command = [sys.executable, "-m", "bench.peak", *arguments]
    done = subprocess.run(
        command, cwd=models.ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"bench.peak failed with exit code {done.returncode}:\n{done.stderr[-4000:]}")
    return int(done.stdout.split()[-1])
