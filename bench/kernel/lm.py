"""The CPU kernel on a small language model: one token of two LLaMA layers of width 1024, past keys and values fed.

Twice: with an output layer of its own, and with one tied to the embedding, whose table is then read two ways.
"""

from __future__ import annotations

from dataclasses import replace

from bench.core.results import Result
from bench.core.workspace import Workspace
from bench.kernel import models
from bench.kernel.compare import Goal, result
from bench.kernel.hosts import Subject
from bench.kernel.sides import OURS, PEERS
from bench.kernel.turns import FULL, QUICK, Piece, Timed, race

_AT_LEAST = 1.8
_PAST = 128  # tokens before the one that is computed


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """Times of every side for both models, and the judged ratios."""
    from bench.kernel import torch_lm

    effort = QUICK if quick else FULL
    longer = replace(effort, seconds=2 * effort.seconds)  # there is but one piece of work for each model
    timed, goals = Timed(), list[Goal]()
    for label, tied in (("LM step, own output layer", False), ("LM step, tied output layer", True)):
        artifact = models.language_model(workspace, tied=tied)
        name = artifact.parent.name
        graph = models.fp32_graph(artifact, workspace.root / f"{name}_fp32" / "model.onnx")
        stored = models.bf16_stored(graph, workspace.root / f"{name}_bf16" / "model.onnx")
        pieces = [Piece(label, torch_lm.feeds(_PAST))]
        found = race((*PEERS, *OURS), Subject(name, artifact, graph, stored), pieces, longer, workspace.root)
        timed.samples |= found.samples
        timed.errors |= found.errors
        timed.absent |= found.absent
        goals += [Goal(label, "cpu", "best peer", _AT_LEAST), Goal(label, "cpu-bf16", "best peer", _AT_LEAST)]
    size = f"{torch_lm.LAYERS} layers of {torch_lm.WIDTH}, hidden {torch_lm.HIDDEN}, vocabulary {torch_lm.VOCABULARY}"
    return result(
        "kernel_lm",
        timed,
        goals,
        title="One token, median time",
        effort=effort,
        settings={"model": f"LLaMA, {size}, seeded random weights", "past_tokens": _PAST, "caches": "cold"},
    )
