"""How large MiniLM's artifact is on disk, against its fp32 checkpoint: as the defaults write it, and parts of it."""

from __future__ import annotations

from bench.core import models
from bench.core.results import Measurement, Result
from bench.core.workspace import Workspace

_AT_MOST, _SERVED_AT_MOST = 1.03, 0.52
_MB = 1e6


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """Sizes of every file, and their sums. There is nothing to shorten."""
    del quick
    models.demo_on_path()
    import minilm

    checkpoint = (minilm.checkpoint() / "model.safetensors").stat().st_size
    sizes = {file.name: file.stat().st_size for file in sorted(workspace.minilm().iterdir())}
    everything = sum(sizes.values())
    return Result(
        "artifact_size",
        (
            Measurement("artifact ÷ checkpoint", everything / checkpoint, at_most=_AT_MOST),
            Measurement(
                "without the residual ÷ checkpoint",
                (everything - sizes["residual.bin"]) / checkpoint,
                at_most=_SERVED_AT_MOST,
            ),
            Measurement("fp32 checkpoint", checkpoint / _MB, "MB"),
            *(Measurement(name, size / _MB, "MB") for name, size in sizes.items()),
        ),
        settings={"model": "all-MiniLM-L6-v2, converted as `make demo` converts it"},
    )
