"""The CPU kernel on MiniLM, from 1×4 to 8×128 tokens, warm and cold caches, against every peer.

ONNX Runtime and OpenVINO run the model in fp32 as the converter exports it, optimised by them as they see fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec

from bench.core import models as inputs
from bench.core.results import Measurement, Result
from bench.core.workspace import Workspace
from bench.kernel import models
from bench.kernel.compare import Goal, result
from bench.kernel.hosts import Subject
from bench.kernel.sides import OURS, PEERS
from bench.kernel.turns import FULL, QUICK, Caches, Effort, Piece, race

# By batch × tokens: of `cpu` against the best fp32 peer.
CPU = {(1, 4): 1.5, (1, 8): 1.3, (1, 16): 1.2, (1, 128): 1.05, (8, 128): 1.05}
_SHORT = ((1, 16), (1, 128))  # the README's
_BF16_PEER = 1.0  # of `cpu-bf16` against the best bf16 peer
_WHOSE = {
    "bf16kit": {side.name for side in OURS},
    "the fastest fp32 peer": {side.name for side in PEERS if side.arithmetic == "fp32"},
    "the fastest bf16 peer": {side.name for side in PEERS if side.arithmetic == "bf16"},
}


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """Times of every side for every batch, and the judged ratios."""
    shapes, effort = (((1, 4),), QUICK) if quick else (tuple(CPU), FULL)
    return _measured("kernel_minilm", workspace, shapes, effort, ("warm", "cold"))


def measure_short(workspace: Workspace, *, quick: bool) -> Result:
    """The same of two batches with warm caches, in no more than five processes: what README shows.

    Without OpenVINO, which is often the fastest peer, there is no result.
    """
    if find_spec("openvino") is None:
        return Result("minilm", skipped="OpenVINO is not installed: pip install '.[bench]'")
    found = _measured("minilm", workspace, _SHORT, QUICK if quick else replace(FULL, further=0), ("warm",))
    grid = found.grids[0]
    times = [
        Measurement(f"{label}: {who}", min(ms), "ms")
        for label, row in grid.rows.items()
        for who, names in _WHOSE.items()
        if (ms := [each for name, each in zip(grid.columns, row, strict=True) if name in names and each is not None])
    ]
    return replace(found, measurements=(*found.measurements, *times))


def _measured(
    name: str, workspace: Workspace, shapes: Sequence[tuple[int, int]], effort: Effort, caches: Sequence[Caches]
) -> Result:
    pieces = {
        (rows, tokens): Piece(f"MiniLM {rows}×{tokens}", inputs.minilm_feeds(rows, tokens), caches=caches)
        for rows, tokens in shapes
    }
    timed = race((*PEERS, *OURS), subject(workspace), list(pieces.values()), effort, workspace.root)
    return result(
        name,
        timed,
        [goal for shape, piece in pieces.items() for goal in _goals_of(piece, CPU[shape])],
        title="MiniLM, batch × tokens, median time",
        effort=effort,
        settings={"model": "all-MiniLM-L6-v2", "judged": "with warm caches; cold ones are shown"},
    )


def subject(workspace: Workspace) -> Subject:
    """MiniLM as each side is given it."""
    artifact = workspace.minilm()
    graph = models.fp32_graph(artifact, workspace.root / "minilm_fp32" / "model.onnx")
    stored = models.bf16_stored(graph, workspace.root / "minilm_bf16" / "model.onnx")
    return Subject("minilm", artifact, graph, stored)


def _goals_of(work: Piece, cpu: float) -> Iterator[Goal]:
    """What is promised for a batch, with warm caches, and what is shown beside it."""
    yield Goal(work.timed("warm"), "cpu", "best fp32 peer", cpu)
    yield Goal(work.timed("warm"), "cpu-bf16", "best bf16 peer", _BF16_PEER)
    if "cold" in work.caches:
        yield Goal(work.timed("cold"), "cpu", "best fp32 peer")
        yield Goal(work.timed("cold"), "cpu-bf16", "best bf16 peer")
