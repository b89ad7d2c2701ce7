"""How far the CPU kernel's sums are from exact ones: products of depth K = 256 to 16384, against float64.

The error of an element is measured against ‖x‖·‖w‖ of its row and column, in units of √K·2⁻²⁴: what rounding errors of
fp32 add up to when they are as often up as down. The weights are the bf16 ones in both, so that nothing but the
arithmetic differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.core.grid import Grid
from bench.core.results import Measurement, Result
from bench.core.workspace import Workspace
from bench.kernel import models as kernel_models
from bench.kernel.compare import OURS
from bench.kernel.sides import Side, onnxruntime_fp32, ours_by_path
from bf16kit.artifact import Artifact

DEPTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
_ROWS, _QUICK_ROWS = (1, 2, 5, 16, 64, 200), (1, 16)
_AT_MOST = 4.0
_UNIT_ROUNDOFF = 2.0**-24
_WIDENED = "ONNX Runtime on the widened weights"


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """The largest error over several row counts, for each depth and path; ONNX Runtime's own beside them."""
    rows = _QUICK_ROWS if quick else _ROWS
    artifact = kernel_models.products(workspace, DEPTHS)
    paths = ours_by_path(artifact)
    here = [side for side in paths if side.prepare is not None]
    if not here:
        return Result("kernel_numerics", skipped="; ".join(side.absent for side in paths))
    widened = kernel_models.fp32_graph(artifact, workspace.root / "products_widened" / "model.onnx", rounded=True)
    sides = [*here, _named(onnxruntime_fp32(widened))]
    errors = {side.name: _errors(side, artifact, rows) for side in sides}
    grid = {f"K = {depth}": [errors[side.name][depth] for side in sides] for depth in DEPTHS}
    return Result(
        "kernel_numerics",
        list(_measurements(errors)),
        settings={"rows": list(rows), "columns": kernel_models.COLUMNS, "depths": list(DEPTHS), "inputs": "Gaussian"},
        grids=[Grid("largest error ÷ (‖x‖·‖w‖·√K·2⁻²⁴)", "", [side.name for side in sides], grid)],
    )


def _measurements(errors: dict[str, dict[int, float]]) -> Iterator[Measurement]:
    for name, by_depth in errors.items():
        bound = _AT_MOST if name.startswith(OURS) else None
        yield Measurement(f"largest error, {name}", max(by_depth.values()), "√K·2⁻²⁴", at_most=bound)


def _named(side: Side) -> Side:
    return Side(_WIDENED, side.prepare)


def _errors(side: Side, artifact: Path, row_counts: tuple[int, ...]) -> dict[int, float]:
    """The largest error for each depth. One run computes all depths; every row count is a run."""
    opened = Artifact.open(artifact, verify=False)
    weights = {depth: opened.tensor(f"w{depth}").astype(np.float64) for depth in DEPTHS}
    worst = dict.fromkeys(DEPTHS, 0.0)
    for rows in row_counts:
        feeds = _feeds(rows)
        outputs = _outputs(side, feeds)
        for depth, weight in weights.items():
            worst[depth] = max(worst[depth], _largest(feeds[f"x{depth}"], weight, outputs[f"y{depth}"]))
    return worst


def _feeds(rows: int) -> dict[str, NDArray[Any]]:
    generator = np.random.default_rng(rows)
    return {f"x{depth}": generator.standard_normal((rows, depth), np.float32) for depth in DEPTHS}


def _outputs(side: Side, feeds: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    assert side.prepare is not None
    result: Any = side.prepare(feeds)()
    return result if isinstance(result, dict) else dict(zip((f"y{depth}" for depth in DEPTHS), result, strict=True))


def _largest(x: NDArray[Any], weight: NDArray[np.float64], y: NDArray[Any]) -> float:
    exact = x.astype(np.float64) @ weight
    norms = np.linalg.norm(x.astype(np.float64), axis=1)[:, None] * np.linalg.norm(weight, axis=0)
    unit = np.sqrt(x.shape[1]) * _UNIT_ROUNDOFF
    return float(np.max(np.abs(y - exact) / norms) / unit)
