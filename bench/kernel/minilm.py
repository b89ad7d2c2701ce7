"""The CPU kernel on MiniLM, from one short sentence to a batch of long ones: its share of a whole model.

The peer is the same checkpoint in fp32 as the converter exports it, optimised by ONNX Runtime as it sees fit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.core import models
from bench.core.interleave import Effort
from bench.core.results import Result
from bench.core.workspace import Workspace
from bench.kernel import models as kernel_models
from bench.kernel.compare import Comparison, judged_ratios
from bench.kernel.sides import SETTINGS, Side, guarded, onnxruntime_fp32, openvino, ours_by_path, torch_module

if TYPE_CHECKING:
    import torch

# The ratio to ONNX Runtime in fp32 promised for each batch of so many tokens.
TARGETS = {(1, 4): 1.7, (1, 8): 1.3, (1, 16): 1.1, (1, 128): 1.0, (8, 128): 1.0}
_EFFORT, _QUICK = Effort(rounds=60, seconds=4.0), Effort(rounds=3, seconds=0.0)


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """Times of every side for every batch, and the judged ratios."""
    effort = _QUICK if quick else _EFFORT
    compared = Comparison(_sides(workspace), tolerance=0.05)
    if compared.skipped:
        return Result("kernel_minilm", skipped=compared.skipped)
    for rows, tokens in TARGETS:
        compared.measure(_label(rows, tokens), models.minilm_feeds(rows, tokens), effort)
    return Result(
        "kernel_minilm",
        list(judged_ratios(compared, {_label(*shape): bound for shape, bound in TARGETS.items()})),
        settings={
            "model": "all-MiniLM-L6-v2",
            "rounds_at_least": effort.rounds,
            "seconds_per_batch": effort.seconds,
        }
        | SETTINGS,
        notes=compared.notes,
        grids=[compared.grid("MiniLM, batch × tokens, median time")],
    )


def _label(rows: int, tokens: int) -> str:
    return f"MiniLM {rows}×{tokens}"


def _sides(workspace: Workspace) -> list[Side]:
    artifact = workspace.minilm()
    graph = kernel_models.fp32_graph(artifact, workspace.root / "minilm_fp32" / "model.onnx")
    stored = kernel_models.bf16_stored(graph, workspace.root / "minilm_bf16" / "model.onnx")
    return [
        onnxruntime_fp32(graph),
        *ours_by_path(artifact),
        guarded("torch fp32", lambda: torch_module(_module(), _dtype("float32"))),
        guarded("torch bf16", lambda: torch_module(_module(), _dtype("bfloat16"))),
        *openvino(stored),
    ]


def _module() -> torch.nn.Module:
    import minilm
    from transformers import AutoModel

    from converter.process.quiet import quiet

    with quiet():  # it would list the weights of the pooler, which is left out
        module: torch.nn.Module = AutoModel.from_pretrained(minilm.checkpoint(), add_pooling_layer=False)
    return module


def _dtype(name: str) -> torch.dtype:
    import torch

    found: torch.dtype = getattr(torch, name)
    return found
