"""How much memory converting safetensors of 1.5 GB through torch takes at its peak, step by step.

Two sources: a checkpoint whose module ``--model`` builds, and a Hugging Face directory. Judged as in
:mod:`bench.conversion.large`, and more strictly: torch's own runs are among the steps that may take 1.2 times the
largest tensor and 300 MB; only those in ONNX Runtime, and of the traced module, may not. The imports are measured as in
:mod:`bench.conversion.memory`: torch and transformers are imported while the source is read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.conversion import large_torch, stepwise
from bench.conversion import memory as conversion_memory
from bench.conversion.large import NOTE, by_step, judged
from bench.core.results import Measurement, Result
from bench.core.workspace import Workspace

_LARGEST = 4 * large_torch.WIDTH**2  # bytes of the largest tensor, in both
_RUNNING = ("checking the prepared graph", "running", "measuring", "searching")  # steps with a session of a profile

Write = Callable[..., tuple[int, list[str]]]
_SOURCES: dict[str, tuple[str, Write]] = {
    "safetensors with --model": ("stack.safetensors", large_torch.write_stack),
    "Hugging Face directory": ("llama", large_torch.write_directory),
}


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """One conversion of each source, to ONNX and TorchScript; needs four times the size of one of disk."""
    workspace.root.mkdir(parents=True, exist_ok=True)
    found: list[Measurement] = []
    for name, (file, write) in _SOURCES.items():
        found += _convert(workspace.root, f"{name}: ", workspace.root / file, write, quick)
    settings = {"models": "24 linear layers of width 4096; LlamaForCausalLM of 5 layers", "samples": "random"}
    return Result("conversion_torch", found, settings=settings | {"formats": "all"}, notes=(NOTE,))


def _convert(root: Path, prefix: str, source: Path, write: Write, quick: bool) -> Iterator[Measurement]:
    checkpoint, options = write(source, quick=quick)
    modules, target = root / f"{source.stem}.modules", root / source.stem / "1"
    flags = ["--out", str(target), "--force", "--no-search", "--allow-over-budget"]
    flags += ["--format", "onnx", "--format", "torchscript"]
    start = time.perf_counter()
    peaks = stepwise.peaks(["run", str(modules), "checkpoint", str(source), *options, *flags])
    seconds = time.perf_counter() - start
    peaks.pop("")
    imports = conversion_memory.imports(modules).anonymous
    sizes = {"largest": _LARGEST, "checkpoint": checkpoint}
    yield from judged(peaks, imports, **sizes, running=_RUNNING, prefix=prefix)
    yield from by_step(peaks, prefix)
    yield Measurement(f"{prefix}the conversion", seconds, "s")
