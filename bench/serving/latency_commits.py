"""What became of an honest client's latency: this tree's `bf16-serve` against that of an earlier commit.

The same client, artifact and Python packages for both. ``BF16KIT_BENCH_COMMIT`` names the commit; without it, it is
the last one before calls were admitted, bounded and watched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from bench.core import models
from bench.core.processes import bf16_serve
from bench.core.results import Result
from bench.core.workspace import Workspace
from bench.serving import wire
from bench.serving.pairs import Effort, compared, take_turns

_BEFORE = "9cae1b078fed5ab628878a933b7bb31f66a225c9"
_EFFORT, _QUICK = Effort(7, 10, 500), Effort(1, 2, 100)


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """The ratio of the two medians of the blocks' p50, and what it is made of."""
    effort = _QUICK if quick else _EFFORT
    commit = os.environ.get("BF16KIT_BENCH_COMMIT", _BEFORE)
    repository = workspace.repository("latency_commits", workspace.mlp())
    before = _tree(workspace.root / "before", commit)
    request = wire.infer_request("mlp", models.mlp_feeds(rows=1))
    pairs = []
    for _ in range(effort.rounds):
        with (
            bf16_serve(repository, workspace.root / "now.log") as now,
            bf16_serve(repository, workspace.root / "then.log", tree=before) as then,
        ):
            pairs += take_turns((now, then), request, effort)
    return Result(
        "latency_commits",
        tuple(compared(pairs, ("this tree", "the earlier commit"))),
        settings={
            "model": "16→64→16 MLP, batch 1, profile cpu",
            "commit": commit,
            **effort.settings(),
            "serving": "defaults",
        },
        notes=("percentiles are medians over blocks; the client's own time is part of both",),
    )


def _tree(folder: Path, commit: str) -> Path:
    """The packages of ``commit``, with this tree's build of the kernel."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    packed = folder / "packages.tar"
    git = ["git", "-C", str(models.ROOT), "archive", "--output", str(packed), commit, "bf16kit", "service"]
    subprocess.run(git, check=True)
    shutil.unpack_archive(packed, folder)
    for library in (models.ROOT / "bf16kit" / "runtime").glob("*.so"):
        shutil.copy(library, folder / "bf16kit" / "runtime")
    return folder
