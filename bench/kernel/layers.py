"""The CPU kernel on four 4096×4096 layers, 1 to 512 rows, caches cold, against every peer and the processor's limit."""

from __future__ import annotations

from collections.abc import Iterator

from bench.core.results import Result
from bench.core.workspace import Workspace
from bench.kernel import models
from bench.kernel.compare import Goal, result
from bench.kernel.hosts import Subject
from bench.kernel.sides import LIMIT, OURS, PEERS, Arithmetic
from bench.kernel.turns import FULL, QUICK, Piece, race

ROWS = (1, 4, 8, 16, 32, 64, 128, 256, 512)
QUICK_ROWS = (1, 64)
# Goals by rows: of `cpu` against the best fp32 peer, and of `cpu-bf16` against the same; from 64 rows on against the
# best bf16 peer, and of the arithmetic that the processor has for bf16.
CPU = {1: 2.0, 4: 1.7, 8: 1.5, 16: 1.3, 32: 1.2}
CPU_BF16 = {8: 2.0, 16: 2.2, 32: 2.2}
_MANY = 64
_BF16_PEER, _OF_LIMIT = 1.0, 0.85


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """Times of every side for every row count, and the judged ratios."""
    effort, rows = (QUICK, QUICK_ROWS) if quick else (FULL, ROWS)
    graph, artifact = models.layers(workspace)
    stored = models.bf16_stored(graph, workspace.root / "layers_bf16" / "model.onnx")
    subject = Subject("layers", artifact, graph, stored)
    timed = race((*PEERS, *OURS, LIMIT), subject, [piece(count) for count in rows], effort, workspace.root)
    return result(
        "kernel",
        timed,
        [goal for count in rows for goal in goals_of(count)],
        title=f"{models.LAYERS} layers of 4096×4096, cold caches, median time",
        effort=effort,
        settings={"model": f"{models.LAYERS} products by {models.WIDTH}×{models.WIDTH}", "caches": "cold"},
    )


def label(rows: int) -> str:
    """What ``rows`` are called."""
    return f"{rows} row{'s' if rows > 1 else ''}"


def piece(rows: int) -> Piece:
    """The work of ``rows``."""
    many = rows >= _MANY
    against: tuple[Arithmetic, ...] = ("bf16",) if many else ("fp32",)
    return Piece(label(rows), models.feeds(rows), 2.0 * rows * models.LAYERS * models.WIDTH**2 * many, against=against)


def goals_of(rows: int) -> Iterator[Goal]:
    """What is promised for ``rows``, and what is shown beside it."""
    name = label(rows)
    yield Goal(name, "cpu", "best fp32 peer", CPU.get(rows))
    yield Goal(name, "cpu-bf16", "best fp32 peer", CPU_BF16.get(rows))
    yield Goal(name, "cpu-bf16", "best bf16 peer", _BF16_PEER if rows >= _MANY else None)
    if rows >= _MANY:
        yield Goal(name, "cpu-bf16", "bf16 arithmetic", _OF_LIMIT)
