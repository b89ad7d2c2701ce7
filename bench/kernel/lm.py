"""The CPU kernel on a small language model: one token of two LLaMA layers of width 1024, past keys and values fed.

Twice: with an output layer of its own, and with one tied to the embedding, whose table is then read two ways.
"""

from __future__ import annotations

from bench.core.interleave import Effort
from bench.core.results import Measurement, Result
from bench.core.workspace import Workspace
from bench.kernel import models as kernel_models
from bench.kernel.compare import Comparison, judged_ratios
from bench.kernel.sides import SETTINGS, Side, guarded, onnxruntime_fp32, openvino, ours_by_path, torch_module

_AT_LEAST = 1.8
_PAST = 128  # tokens before the one that is computed
_EFFORT, _QUICK = Effort(rounds=60, seconds=6.0), Effort(rounds=3, seconds=0.0)


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """Times of every side for both models, and the judged ratios."""
    from bench.kernel import torch_lm

    effort = _QUICK if quick else _EFFORT
    measurements: list[Measurement] = []
    notes: list[str] = []
    grids = []
    for tied in (False, True):
        label = f"LM step, {'tied' if tied else 'own'} output layer"
        compared = Comparison(_sides(workspace, tied=tied), tolerance=0.05)
        if compared.skipped:
            return Result("kernel_lm", skipped=compared.skipped)
        compared.measure(label, torch_lm.feeds(_PAST), effort)
        measurements += judged_ratios(compared, {label: _AT_LEAST})
        notes += [note for note in compared.notes if note not in notes]
        grids.append(compared.grid(f"{label}, median time"))
    size = f"{torch_lm.LAYERS} layers of {torch_lm.WIDTH}, hidden {torch_lm.HIDDEN}, vocabulary {torch_lm.VOCABULARY}"
    return Result(
        "kernel_lm",
        measurements,
        settings={
            "model": f"LLaMA, {size}, seeded random weights",
            "past_tokens": _PAST,
            "rounds_at_least": effort.rounds,
        }
        | SETTINGS,
        notes=notes,
        grids=grids,
    )


def _sides(workspace: Workspace, *, tied: bool) -> list[Side]:
    artifact = kernel_models.language_model(workspace, tied=tied)
    name = artifact.parent.name
    graph = kernel_models.fp32_graph(artifact, workspace.root / f"{name}_fp32" / "model.onnx")
    stored = kernel_models.bf16_stored(graph, workspace.root / f"{name}_bf16" / "model.onnx")
    return [
        onnxruntime_fp32(graph),
        *ours_by_path(artifact),
        guarded("torch bf16", lambda: _torch(tied=tied)),
        *openvino(stored),
    ]


def _torch(*, tied: bool) -> Side:
    import torch

    from bench.kernel import torch_lm

    return torch_module(torch_lm.step(tied=tied), torch.bfloat16)
