"""How far the CPU kernel's sums are from exact ones: products of depth K = 256 to 16384, against float64.

The error of an element is measured against ‖x‖·‖w‖ of its row and column, in units of √K·2⁻²⁴: what rounding errors of
fp32 add up to when they are as often up as down. The weights are the bf16 ones in both, so that nothing but the
arithmetic differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from bench.core.grid import Grid
from bench.core.results import Measurement, Result
from bench.core.workspace import Workspace
from bench.kernel import models as kernel_models
from bench.kernel.hosts import Absent, Prepare, Subject, Work, onnxruntime, ours
from bench.kernel.sides import OURS
from bf16kit.artifact.artifact import Artifact

DEPTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
_ROWS, _QUICK_ROWS = (1, 2, 5, 16, 64, 200), (1, 16)
_AT_MOST = 4.0
_UNIT_ROUNDOFF = 2.0**-24
_WIDENED = "ONNX Runtime on the widened weights"
_ROUNDED = {side.name for side in OURS if side.arithmetic == "bf16"}


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """The largest error over several row counts, for each depth and path; ONNX Runtime's own beside them."""
    rows = _QUICK_ROWS if quick else _ROWS
    artifact = kernel_models.products(workspace, DEPTHS)
    widened = kernel_models.fp32_graph(artifact, workspace.root / "products_widened" / "model.onnx", rounded=True)
    subject = Subject("products", artifact, widened, widened)
    sides, absent = _opened(subject)
    if not sides:
        return Result("kernel_numerics", skipped="; ".join(absent))
    opened = {**sides, _WIDENED: onnxruntime.open_side({}, subject)}
    errors = {name: _errors(prepare, artifact, rows, rounded=name in _ROUNDED) for name, prepare in opened.items()}
    grid = {f"K = {depth}": [errors[name][depth] for name in opened] for depth in DEPTHS}
    return Result(
        "kernel_numerics",
        list(_measurements(errors)),
        settings={"rows": list(rows), "columns": kernel_models.COLUMNS, "depths": list(DEPTHS), "inputs": "Gaussian"},
        notes=[*absent, "cpu-bf16 is given inputs that bf16 holds: its rounding of them is no error of its sums"],
        grids=[Grid("largest error ÷ (‖x‖·‖w‖·√K·2⁻²⁴)", "", list(opened), grid)],
    )


def _opened(subject: Subject) -> tuple[dict[str, Prepare], list[str]]:
    """Our sides that run here, and why the others do not."""
    sides, absent = dict[str, Prepare](), list[str]()
    for side in OURS:
        try:
            sides[side.name] = ours.open_side(side.options, subject)
        except Absent as reason:
            absent.append(f"{side.name}: {reason}")
    return sides, absent


def _measurements(errors: dict[str, dict[int, float]]) -> Iterator[Measurement]:
    for name, by_depth in errors.items():
        bound = None if name == _WIDENED else _AT_MOST
        yield Measurement(f"largest error, {name}", max(by_depth.values()), "√K·2⁻²⁴", at_most=bound)


def _errors(prepare: Prepare, artifact: Path, row_counts: tuple[int, ...], *, rounded: bool) -> dict[int, float]:
    """The largest error for each depth. One run computes all depths; every row count is a run."""
    opened = Artifact.open(artifact, verify=False)
    weights = {depth: opened.tensor(f"w{depth}").astype(np.float64) for depth in DEPTHS}
    worst = dict.fromkeys(DEPTHS, 0.0)
    for rows in row_counts:
        feeds = _feeds(rows, rounded=rounded)
        outputs = _outputs(prepare, feeds)
        for depth, weight in weights.items():
            worst[depth] = max(worst[depth], _largest(feeds[f"x{depth}"], weight, outputs[f"y{depth}"]))
    return worst


def _feeds(rows: int, *, rounded: bool) -> dict[str, NDArray[Any]]:
    generator = np.random.default_rng(rows)
    feeds = {f"x{depth}": generator.standard_normal((rows, depth), np.float32) for depth in DEPTHS}
    return {name: x.astype(ml_dtypes.bfloat16).astype(np.float32) for name, x in feeds.items()} if rounded else feeds


def _outputs(prepare: Prepare, feeds: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    result: Any = prepare(feeds, Work()).run()
    return result if isinstance(result, dict) else dict(zip((f"y{depth}" for depth in DEPTHS), result, strict=True))


def _largest(x: NDArray[Any], weight: NDArray[np.float64], y: NDArray[Any]) -> float:
    exact = x.astype(np.float64) @ weight
    norms = np.linalg.norm(x.astype(np.float64), axis=1)[:, None] * np.linalg.norm(weight, axis=0)
    unit = np.sqrt(x.shape[1]) * _UNIT_ROUNDOFF
    return float(np.max(np.abs(y - exact) / norms) / unit)
