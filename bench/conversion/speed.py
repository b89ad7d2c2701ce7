"""How long converting MiniLM takes, imports and all, on two processors."""

from __future__ import annotations

import os
import time
from statistics import median

from bench.core import models
from bench.core.results import Measurement, Result
from bench.core.workspace import BOTH_FORMATS, Workspace, convert

_AT_MOST = 25.0  # seconds
_RUNS, _QUICK = 5, 1
_CPUS = 2


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """The median of several conversions, each in a process of its own; ONNX and TorchScript, 200 real sentences."""
    models.demo_on_path()
    import minilm

    artifact = workspace.root / "conversion_speed" / "1"
    artifact.parent.mkdir(parents=True, exist_ok=True)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a user's Python keeps the bytecode of what it imports
    cpus, seconds = os.sched_getaffinity(0), list[float]()
    os.sched_setaffinity(0, sorted(cpus)[:_CPUS])  # of the conversions, too
    for _ in range(_QUICK if quick else _RUNS):
        started = time.perf_counter()
        convert(minilm.checkpoint(), artifact, "--force", "--samples", "minilm:calibration", *BOTH_FORMATS)
        seconds.append(time.perf_counter() - started)
    os.sched_setaffinity(0, cpus)
    return Result(
        "conversion_speed",
        (
            Measurement("bf16-convert", median(seconds), "s", at_most=_AT_MOST),
            Measurement("the fastest", min(seconds), "s"),
        ),
        settings={"model": "all-MiniLM-L6-v2", "runs": len(seconds), "processors": _CPUS, "formats": "all"},
    )
