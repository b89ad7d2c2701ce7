"""How much memory converting MiniLM takes at its peak, beyond what its imports take.

Judged is anonymous memory, which the system cannot take back: the process' own. Resident memory, shown beside it, also
counts pages of mapped files (the code of torch's libraries as it is first run, checkpoint, weights just written), which
are the page cache's and are dropped when memory is short. The imports are measured in a process that imports every
module the conversion had imported, and does no more.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.core import models
from bench.core.results import Measurement, Result
from bench.core.workspace import Workspace

_AT_MOST = 3.0
_RUNS, _QUICK = 3, 1
_SAMPLE_S = 0.002
_MB = 1e6


@dataclass(frozen=True, slots=True)
class Peak:
    """The largest seen in one process, in bytes."""

    anonymous: int = 0
    resident: int = 0


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
    convert += ["--format", "onnx", "--format", "torchscript"]
    peaks = [_peak(*convert, "--samples", "minilm:calibration") for _ in range(runs)]
    bare = [imports(modules) for _ in range(runs)]
    anonymous, bare_anonymous = median(peak.anonymous for peak in peaks), median(peak.anonymous for peak in bare)
    resident, bare_resident = median(peak.resident for peak in peaks), median(peak.resident for peak in bare)
    return Result(
        "conversion_memory",
        (
            Measurement(
                "peak beyond the imports ÷ checkpoint", (anonymous - bare_anonymous) / checkpoint, at_most=_AT_MOST
            ),
            Measurement("the same with mapped files", (resident - bare_resident) / checkpoint),
            Measurement("peak", anonymous / _MB, "MB"),
            Measurement("imports", bare_anonymous / _MB, "MB"),
            Measurement("peak with mapped files", resident / _MB, "MB"),
            Measurement("imports with mapped files", bare_resident / _MB, "MB"),
            Measurement("fp32 checkpoint", checkpoint / _MB, "MB"),
        ),
        settings={"model": "all-MiniLM-L6-v2", "runs": runs, "samples": "200 real sentences", "formats": "all"},
        notes=("judged is anonymous memory; mapped files are page cache, which the system can drop",),
    )


def imports(modules: Path) -> Peak:
    """The peak of a process that imports what the file ``modules`` lists, and does no more."""
    return _peak("import", str(modules))


def _peak(*arguments: str) -> Peak:
    """The peak of ``python -m bench.conversion.process`` with ``arguments``."""
    environment = {**os.environ, "PYTHONPATH": str(models.DEMO)}
    command = [sys.executable, "-m", "bench.conversion.process", *arguments]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, cwd=models.ROOT, env=environment, stdout=log, stderr=log)
        peak = _watch(process)
        if process.returncode:
            log.seek(0)
            raise RuntimeError(
                f"bench.conversion.process failed with exit code {process.returncode}:\n{log.read()[-4000:]}"
            )
    return peak


def _watch(process: subprocess.Popen[bytes]) -> Peak:
    """Sample until the process ends: the kernel keeps the peak of resident memory, but not that of anonymous."""
    peak = Peak()
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        if "VmHWM" in fields:  # absent once the process is ending
            peak = Peak(max(peak.anonymous, _bytes(fields["RssAnon"])), max(peak.resident, _bytes(fields["VmHWM"])))
        time.sleep(_SAMPLE_S)
    return peak


def _bytes(kilobytes: str) -> int:
    return int(kilobytes.split()[0]) * 1024
