"""How much memory converting an ONNX model of 6 GB takes at its peak, step by step.

Judged is anonymous memory beyond the imports, as in :mod:`bench.conversion.memory`. The steps that check nothing by
running it (reading, planning, writing, comparing) may take 1.2 times the largest tensor and 300 MB; all together, with
the reference and the emulated profile in ONNX Runtime, 2.2 times the checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from bench.conversion import large_onnx, stepwise
from bench.conversion.stepwise import Memory
from bench.core.results import Measurement, Result
from bench.core.workspace import Workspace

NOTE = "judged is anonymous memory; mapped files are page cache, which the system can drop"
_GIGABYTES, _QUICK = 6.0, 0.5
_RUNNING = ("asking", "checking", "running", "measuring", "searching")  # how steps begin that run the model
_SLACK, _LARGEST_TIMES, _CHECKPOINT_TIMES = 300e6, 1.2, 2.2
_MB = 1e6


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """One conversion of a model made for it; needs three times its size of disk."""
    workspace.root.mkdir(parents=True, exist_ok=True)
    source, target = workspace.root / "large.onnx", workspace.root / "large" / "1"
    checkpoint = large_onnx.write(source, _QUICK if quick else _GIGABYTES)
    modules = workspace.root / "conversion_large.modules"
    start = time.perf_counter()
    peaks = stepwise.peaks(
        ["run", str(modules), "checkpoint", str(source), "--out", str(target), "--force", "--no-search"]
    )
    seconds = time.perf_counter() - start
    imports = peaks.pop("").anonymous
    return Result(
        "conversion_large",
        (
            *judged(peaks, imports, largest=large_onnx.LARGEST, checkpoint=checkpoint, running=_RUNNING),
            *by_step(peaks),
            Measurement("the conversion", seconds, "s"),
        ),
        settings={"model": f"{checkpoint / 1e9:.1f} GB of tables and products", "samples": "random"},
        notes=(NOTE,),
    )


def judged(
    peaks: Mapping[str, Memory],
    imports: int,
    *,
    largest: int,
    checkpoint: int,
    running: tuple[str, ...],
    prefix: str = "",
) -> Iterator[Measurement]:
    """The two bounds, and what they are made of; steps that begin with one of ``running`` are judged by the second."""
    beyond = {step: memory.anonymous - imports for step, memory in peaks.items()}
    apart = max(size for step, size in beyond.items() if not step.startswith(running))
    allowed = _LARGEST_TIMES * largest + _SLACK
    yield Measurement(f"{prefix}peak of the steps that run nothing ÷ allowed", apart / allowed, at_most=1.0)
    yield Measurement(
        f"{prefix}peak beyond the imports ÷ checkpoint", max(beyond.values()) / checkpoint, at_most=_CHECKPOINT_TIMES
    )
    yield Measurement(f"{prefix}peak of the steps that run nothing", apart / _MB, "MB")
    yield Measurement(f"{prefix}allowed: 1.2 × the largest tensor + 300 MB", allowed / _MB, "MB")
    yield Measurement(f"{prefix}fp32 checkpoint", checkpoint / _MB, "MB")
    yield Measurement(f"{prefix}imports", imports / _MB, "MB")


def by_step(peaks: Mapping[str, Memory], prefix: str = "") -> Iterator[Measurement]:
    """The peaks of every step, each kind of memory on its own."""
    yield from (Measurement(f"{prefix}{step}, anonymous", each.anonymous / _MB, "MB") for step, each in peaks.items())
    yield from (Measurement(f"{prefix}{step}, mapped", each.mapped / _MB, "MB") for step, each in peaks.items())
