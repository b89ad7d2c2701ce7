"""The CPU kernel on MiniLM, from 1×4 to 8×128 tokens, warm and cold caches, against every peer.

ONNX Runtime and OpenVINO run the model in fp32 as the converter exports it, optimised by them as they see fit.
"""

from __future__ import annotations

from collections.abc import Iterator

from bench.core import models as inputs
from bench.core.results import Result
from bench.core.workspace import Workspace
from bench.kernel import models
from bench.kernel.compare import Goal, result
from bench.kernel.hosts import Subject
from bench.kernel.sides import OURS, PEERS
from bench.kernel.turns import FULL, QUICK, Piece, race

# By batch × tokens: of `cpu` against the best fp32 peer.
CPU = {(1, 4): 1.5, (1, 8): 1.3, (1, 16): 1.2, (1, 128): 1.05, (8, 128): 1.05}
_BF16_PEER = 1.0  # of `cpu-bf16` against the best bf16 peer
_QUICK = ((1, 4),)


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """Times of every side for every batch, and the judged ratios."""
    effort, shapes = (QUICK, _QUICK) if quick else (FULL, tuple(CPU))
    timed = race((*PEERS, *OURS), subject(workspace), [piece(*shape) for shape in shapes], effort, workspace.root)
    return result(
        "kernel_minilm",
        timed,
        [goal for shape in shapes for goal in goals_of(*shape)],
        title="MiniLM, batch × tokens, median time",
        tolerance={"fp32": 0.02, "bf16": 0.05},
        effort=effort,
        settings={"model": "all-MiniLM-L6-v2", "judged": "with warm caches; cold ones are shown"},
    )


def subject(workspace: Workspace) -> Subject:
    """MiniLM as each side is given it."""
    artifact = workspace.minilm()
    graph = models.fp32_graph(artifact, workspace.root / "minilm_fp32" / "model.onnx")
    stored = models.bf16_stored(graph, workspace.root / "minilm_bf16" / "model.onnx")
    return Subject("minilm", artifact, graph, stored)


def label(rows: int, tokens: int) -> str:
    """What a batch of ``rows`` × ``tokens`` is called."""
    return f"MiniLM {rows}×{tokens}"


def piece(rows: int, tokens: int) -> Piece:
    """The work of one batch."""
    return Piece(label(rows, tokens), inputs.minilm_feeds(rows, tokens), caches=("warm", "cold"))


def goals_of(rows: int, tokens: int) -> Iterator[Goal]:
    """What is promised for a batch, with warm caches, and what is shown beside it."""
    name = label(rows, tokens)
    yield Goal(f"{name}, warm", "cpu", "best fp32 peer", CPU[rows, tokens])
    yield Goal(f"{name}, warm", "cpu-bf16", "best bf16 peer", _BF16_PEER)
    yield Goal(f"{name}, cold", "cpu", "best fp32 peer")
    yield Goal(f"{name}, cold", "cpu-bf16", "best bf16 peer")
