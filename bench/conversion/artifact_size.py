"""How large MiniLM's artifact is, against its fp32 checkpoint."""

from __future__ import annotations

from bench.core import models
from bench.core.results import Measurement, Result
from bench.core.workspace import Workspace

_SERVED_AT_MOST = 0.52
_RESTORABLE_AT_MOST = 1.03
_GRAPHS = ("cpu.onnx", "cpu-bf16.onnx", "cuda.onnx", "reference.onnx")
_MB = 1e6


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """Sizes on disk of every file, and the two ratios that design.md promises. There is nothing to shorten."""
    del quick
    models.demo_on_path()
    import minilm

    checkpoint = (minilm.checkpoint() / "model.safetensors").stat().st_size
    sizes = {file.name: file.stat().st_size for file in sorted(workspace.minilm().iterdir())}
    served = sum(sizes[name] for name in ("weights.bf16", "weights.fp32", *_GRAPHS))
    restorable = served + sizes["residual.bin"]
    return Result(
        "artifact_size",
        (
            Measurement("weights and ONNX graphs ÷ checkpoint", served / checkpoint, at_most=_SERVED_AT_MOST),
            Measurement("with residual ÷ checkpoint", restorable / checkpoint, at_most=_RESTORABLE_AT_MOST),
            Measurement("fp32 checkpoint", checkpoint / _MB, "MB"),
            *(Measurement(name, size / _MB, "MB") for name, size in sizes.items()),
        ),
        settings={"model": "all-MiniLM-L6-v2", "graphs": list(_GRAPHS)},
        notes=("model.torchscript.pt holds a second copy of the weights, in bf16, for users who ask for TorchScript",),
    )
