"""Sides compared on one piece of work after another, and what the CPU kernel's ratios to fp32 are judged by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from bench.core.grid import Grid
from bench.core.interleave import Effort, Run, Timings, interleaved
from bench.core.results import Measurement
from bench.kernel.sides import FP32, Feeds, Side, first_line, first_output

_MS = 1e3
OURS = "ours, "


class Comparison:
    """Times of ``sides`` by piece of work. All must agree with ONNX Runtime in fp32 within ``tolerance``, relative L2.

    ``notes`` say who is absent and why.
    """

    def __init__(self, sides: Sequence[Side], *, tolerance: float) -> None:
        self.sides = sides
        self.times: dict[str, dict[str, Timings]] = {}
        self.notes = [f"{side.name}: {side.absent}" for side in sides if side.absent]
        self._tolerance = tolerance

    @property
    def ours(self) -> list[Side]:
        """The paths of the kernel that run here."""
        return [side for side in self.sides if side.name.startswith(OURS) and side.prepare is not None]

    @property
    def skipped(self) -> str:
        """Why there is nothing to compare: no path of the kernel runs here. Empty when one does."""
        return "" if self.ours else "; ".join(self.notes)

    def measure(self, label: str, feeds: Feeds, effort: Effort) -> None:
        """Time every side on ``feeds``; ONNX Runtime and ours in every round."""
        runs: dict[str, Run] = {}
        for side in self.sides:
            if side.prepare is None:
                continue
            try:
                run = side.prepare(feeds)
                output = first_output(run)
            except Exception as error:
                if side.name == FP32 or side.name.startswith(OURS):
                    raise
                # Peers are other people's programs: one that fails on these feeds has no time for them.
                self.notes.append(f"{side.name} on {label}: {first_line(error)}")
                continue
            self._check(side.name, output, runs)
            runs[side.name] = run
        always = {FP32, *(side.name for side in self.ours)}
        linger = {side.name for side in self.sides if side.lingers}
        self.times[label] = interleaved(runs, effort, always=always & runs.keys(), linger=linger)

    def ratio(self, label: str, name: str) -> float | None:
        """How many times as fast as ONNX Runtime in fp32 ``name`` is, by the medians."""
        times = self.times[label]
        return times[FP32].median / times[name].median if name in times else None

    def grid(self, title: str) -> Grid:
        """Median milliseconds."""
        names = [side.name for side in self.sides]
        rows = {
            label: [times[name].median * _MS if name in times else None for name in names]
            for label, times in self.times.items()
        }
        return Grid(title, "ms", names, rows)

    def _check(self, name: str, output: NDArray[np.float64], runs: Mapping[str, Run]) -> None:
        if FP32 not in runs:
            return
        expected = first_output(runs[FP32])
        assert output.shape == expected.shape, (name, output.shape, expected.shape)
        error = float(np.linalg.norm(output - expected) / np.linalg.norm(expected))
        if not error <= self._tolerance:
            self.notes.append(f"{name} is off by {error:.2g} (relative L2), more than {self._tolerance:g}")


def judged_ratios(compared: Comparison, targets: Mapping[str, float]) -> Iterator[Measurement]:
    """The ratio of every path of ours that runs here, on every piece of work."""
    for label, bound in targets.items():
        for side in compared.ours:
            ratio = compared.ratio(label, side.name)
            if ratio is not None:
                yield Measurement(f"{label}: fp32 ÷ {side.name}", ratio, at_least=bound)
