"""A 16→16 MLP served by `bf16-serve`, MLServer and PyTriton to 1, 8 and 32 requests in flight."""

from __future__ import annotations

from bench.core import models
from bench.core.results import Result
from bench.core.workspace import Workspace
from bench.peers import environments, rates
from bench.peers.contenders import Case, contenders
from bench.serving import wire

_AT_LEAST = 1.5
_IN_FLIGHT = (1, 8, 32)


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """Our requests per second over the better peer's."""
    try:
        versions = environments.versions()
    except RuntimeError as error:
        return Result("peers_mlp", skipped=str(error))
    artifact = workspace.mlp()
    case = Case("mlp", workspace.root / "mlp.onnx", artifact)
    return rates.compare(
        "peers_mlp",
        contenders(workspace, case),
        wire.infer_request("mlp", models.mlp_feeds(rows=1)),
        _IN_FLIGHT,
        goal=_AT_LEAST,
        against="",
        effort=rates.QUICK if quick else rates.FULL,
        settings={"model": "16→64→16 MLP, one row", **versions},
    )
