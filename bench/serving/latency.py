"""What `bf16-serve` adds to one request: a 16→16 MLP, one request in flight, against a bare grpcio handler.

The client code, the bytes it sends, the graph and the session's options are the same for both. Latency on a busy
virtual machine has two levels that hold for the life of a process, depending on where the kernel put its threads: hence
several rounds, each with processes of its own.
"""

from __future__ import annotations

from bench.core import models
from bench.core.processes import bare_handler, bf16_serve
from bench.core.results import Result
from bench.core.workspace import Workspace
from bench.serving import wire
from bench.serving.pairs import Effort, compared, take_turns

_AT_MOST = 1.15
_EFFORT, _QUICK = Effort(5, 10, 500), Effort(1, 2, 100)


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """The ratio of the two medians of the blocks' p50, and what it is made of."""
    effort = _QUICK if quick else _EFFORT
    artifact = workspace.mlp()
    repository = workspace.repository("latency_mlp", artifact)
    request = wire.infer_request("mlp", models.mlp_feeds(rows=1))
    pairs = []
    for _ in range(effort.rounds):
        with (
            bf16_serve(repository, workspace.root / "latency_mlp.log") as served,
            bare_handler(artifact / "cpu.onnx") as bare,
        ):
            pairs += take_turns((served, bare), request, effort)
    return Result(
        "latency_mlp",
        tuple(compared(pairs, ("bf16-serve", "a bare handler"), at_most=_AT_MOST)),
        settings={"model": "16→64→16 MLP, batch 1, profile cpu", **effort.settings(), "serving": "defaults"},
        notes=("percentiles are medians over blocks; the client's own time is part of both",),
    )
