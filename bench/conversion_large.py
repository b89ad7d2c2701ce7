"""How much memory converting an ONNX model of 6 GB takes at its peak, step by step.

Judged is anonymous memory beyond the imports, as in :mod:`bench.conversion_memory`. The steps that check nothing by
running it (reading, planning, writing, comparing) may take 1.2 times the largest tensor and 300 MB; all together, with
the reference and the emulated profile in ONNX Runtime, 2.2 times the checkpoint.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from bench import large_onnx, models
from bench.results import Measurement, Result
from bench.workspace import Workspace

_GIGABYTES, _QUICK = 6.0, 0.5
_RUNNING = ("asking", "checking", "running", "measuring", "searching")  # how steps begin that run the model
_SLACK, _LARGEST_TIMES, _CHECKPOINT_TIMES = 300e6, 1.2, 2.2
_SAMPLE_S = 0.002
_MB = 1e6
_SAID = "bf16-convert: "


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """One conversion of a model made for it; needs three times its size of disk."""
    workspace.root.mkdir(parents=True, exist_ok=True)
    source = workspace.root / "large.onnx"
    checkpoint = large_onnx.write(source, _QUICK if quick else _GIGABYTES)
    start = time.perf_counter()
    peaks = _convert(source, workspace.root / "large" / "1")
    seconds = time.perf_counter() - start
    imports = peaks.pop("")
    beyond = {step: (anonymous - imports[0]) for step, (anonymous, _) in peaks.items()}
    apart = max(size for step, size in beyond.items() if not step.startswith(_RUNNING))
    allowed = _LARGEST_TIMES * large_onnx.LARGEST + _SLACK
    return Result(
        "conversion_large",
        (
            Measurement("peak of the steps that run nothing ÷ allowed", apart / allowed, at_most=1.0),
            Measurement(
                "peak beyond the imports ÷ checkpoint", max(beyond.values()) / checkpoint, at_most=_CHECKPOINT_TIMES
            ),
            Measurement("peak of the steps that run nothing", apart / _MB, "MB"),
            Measurement("allowed: 1.2 × the largest tensor + 300 MB", allowed / _MB, "MB"),
            Measurement("fp32 checkpoint", checkpoint / _MB, "MB"),
            Measurement("imports", imports[0] / _MB, "MB"),
            *(Measurement(f"{step}, anonymous", size[0] / _MB, "MB") for step, size in peaks.items()),
            *(Measurement(f"{step}, mapped", size[1] / _MB, "MB") for step, size in peaks.items()),
            Measurement("the conversion", seconds, "s"),
        ),
        settings={"model": f"{checkpoint / 1e9:.1f} GB of tables and products", "samples": "random"},
        notes=("judged is anonymous memory; mapped files are page cache, which the system can drop",),
    )


def _convert(source: Path, target: Path) -> dict[str, tuple[int, int]]:
    """Peaks of anonymous and of mapped memory, in bytes, by step; "" is before the first."""
    command = [sys.executable, "-c", "from converter.cli import main; main()", "checkpoint", str(source)]
    command += ["--out", str(target), "--force", "--no-search"]
    environment = {**os.environ, "PYTHONPATH": str(models.ROOT)}
    step, peaks, said = [""], {"": (0, 0)}, []
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=models.ROOT, env=environment)

    def listen() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            said.append(line)
            name = line.removeprefix(_SAID).strip()
            if line.startswith(_SAID) and ": " not in name:  # not one of the lines that say how far a step is
                step[0] = name

    listener = threading.Thread(target=listen)
    listener.start()
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        if "RssAnon" in fields:  # absent once the process is ending
            before = peaks.get(step[0], (0, 0))
            peaks[step[0]] = (max(before[0], _bytes(fields["RssAnon"])), max(before[1], _bytes(fields["RssFile"])))
        time.sleep(_SAMPLE_S)
    listener.join()
    if process.returncode:
        raise RuntimeError(f"the conversion failed with exit code {process.returncode}:\n{''.join(said)[-4000:]}")
    return peaks


def _bytes(kilobytes: str) -> int:
    return int(kilobytes.split()[0]) * 1024
