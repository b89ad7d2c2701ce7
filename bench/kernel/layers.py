"""The CPU kernel on four 4096×4096 layers, 1 to 512 rows, against ONNX Runtime in fp32, torch in bf16 and OpenVINO.

All sides run in this process and take turns, run by run. The machine's read bandwidth is measured between the runs of
one row, because a virtual machine's varies with its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.core.interleave import Effort, Timings, interleaved
from bench.core.results import Measurement, Result
from bench.core.workspace import Workspace
from bench.kernel import models as kernel_models
from bench.kernel.bandwidth import Bandwidth, NoCompiler, Passes, bandwidth
from bench.kernel.compare import Comparison, judged_ratios
from bench.kernel.sides import (
    SETTINGS,
    THREADS,
    Side,
    guarded,
    onnxruntime_fp32,
    openvino,
    ours_by_path,
    torch_module,
)

LAYERS = 4
ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64, 128, 256, 512)
# The first row count from which each ratio to ONNX Runtime in fp32 is promised.
TARGETS = {1: 2.2, 2: 2.0, 5: 1.2, 32: 1.05, 64: 1.0}
_OF_BANDWIDTH = 0.85
_EFFORT, _QUICK = Effort(rounds=30, seconds=3.0), Effort(rounds=3, seconds=0.0)
_BLOCKS, _QUICK_BLOCKS = 12, 2
_ROUNDS_PER_BLOCK, _PASSES = 5, 5
_WEIGHT_BYTES = LAYERS * kernel_models.WIDTH**2 * 2


def target(rows: int) -> float:
    """The ratio promised for ``rows``."""
    return TARGETS[max(first for first in TARGETS if first <= rows)]


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """Times of every side for every row count, the judged ratios, and the share of the bandwidth at one row."""
    effort = _QUICK if quick else _EFFORT
    graph, artifact = kernel_models.layers(workspace, LAYERS)
    compared = Comparison(_sides(workspace, graph, artifact), tolerance=0.02)
    if compared.skipped:
        return Result("kernel", skipped=compared.skipped)
    moved = _one_row(workspace, compared, _QUICK_BLOCKS if quick else _BLOCKS)
    for rows in ROWS:
        compared.measure(_label(rows), kernel_models.feeds(rows), effort)
    targets = {_label(rows): target(rows) for rows in ROWS}
    return Result(
        "kernel",
        [*judged_ratios(compared, targets), *moved.measurements()],
        settings={
            "model": f"{LAYERS} products by {kernel_models.WIDTH}×{kernel_models.WIDTH}, fp32 activations",
            "rounds_at_least": effort.rounds,
            "seconds_per_row_count": effort.seconds,
            "bandwidth": moved.how,
        }
        | SETTINGS,
        notes=[*compared.notes, *moved.notes],
        grids=[compared.grid(f"{LAYERS} layers of 4096×4096, median time")],
    )


def _label(rows: int) -> str:
    return f"{rows} row{'s' if rows > 1 else ''}"


def _sides(workspace: Workspace, graph: Path, artifact: Path) -> list[Side]:
    stored = kernel_models.bf16_stored(graph, workspace.root / "layers4_bf16" / "model.onnx")
    return [
        onnxruntime_fp32(graph),
        *ours_by_path(artifact),
        guarded("torch bf16", lambda: _torch(graph)),
        *openvino(stored),
    ]


def _torch(graph: Path) -> Side:
    import onnx
    import torch
    from onnx import numpy_helper

    linears = []
    for tensor in onnx.load(graph).graph.initializer:
        linear = torch.nn.Linear(kernel_models.WIDTH, kernel_models.WIDTH, bias=False)
        linear.weight = torch.nn.Parameter(torch.from_numpy(np.ascontiguousarray(numpy_helper.to_array(tensor).T)))
        linears.append(linear)
    return torch_module(torch.nn.Sequential(*linears), torch.bfloat16)


# --- one row against the machine's bandwidth --------------------------------------------------------------------------


@dataclass(slots=True)
class Moved:
    """Of every path, GB/s at one row in each block, and the bandwidth measured around it."""

    kernel: dict[str, list[float]] = field(default_factory=dict)
    machine: list[Passes] = field(default_factory=list)
    how: str = "not measured"
    notes: list[str] = field(default_factory=list)

    def measurements(self) -> Sequence[Measurement]:
        """The share of the bandwidth that each path moves: of the medians, and of the best."""
        if not self.machine:
            return ()
        usual, best = median(found.median for found in self.machine), max(found.best for found in self.machine)
        found = [
            Measurement("read bandwidth, median", usual, "GB/s"),
            Measurement("read bandwidth, best", best, "GB/s"),
        ]
        for name, moved in self.kernel.items():
            found += [
                Measurement(f"1 row, {name} ÷ bandwidth", median(moved) / usual, at_least=_OF_BANDWIDTH),
                Measurement(f"1 row, {name} ÷ bandwidth, both at their best", max(moved) / best),
                Measurement(f"1 row, {name}", median(moved), "GB/s"),
            ]
        return found


def _one_row(workspace: Workspace, compared: Comparison, blocks: int) -> Moved:
    """Blocks of runs of one row between measurements of the bandwidth."""
    moved = Moved()
    feeds = kernel_models.feeds(1)
    runs = {side.name: side.prepare(feeds) for side in compared.ours if side.prepare is not None}
    with ExitStack() as stack:
        try:
            machine = stack.enter_context(bandwidth(workspace.root / "bandwidth", THREADS))
        except NoCompiler as error:
            moved.notes.append(f"bandwidth not measured: {error}")
            return moved
        moved.how = machine.how
        moved.kernel = {name: [] for name in runs}
        moved.machine.append(machine.measure(_PASSES))
        for _ in range(blocks):
            _block(runs, machine, moved)
    return moved


def _block(runs: dict[str, Any], machine: Bandwidth, moved: Moved) -> None:
    timed: dict[str, Timings] = interleaved(runs, Effort(_ROUNDS_PER_BLOCK, 0.0), always=runs)
    for name, timings in timed.items():
        moved.kernel[name] += [_WEIGHT_BYTES / seconds / 1e9 for seconds in timings.seconds]
    moved.machine.append(machine.measure(_PASSES))
