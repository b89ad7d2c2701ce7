"""What a benchmark found: measurements with their targets, and the JSON file and table they are read from."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.core import machine as machines
from bench.core.grid import Grid
from bench.core.verdict import Estimate, Samples, Verdict, verdict

RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One number. With ``at_most`` or ``at_least`` it is judged; without, it is there to explain those that are.

    ``interval`` holds the value with a confidence of about 95 %; a goal inside it is neither met nor missed.
    ``detail`` says what exactly was compared; ``absent`` why there is no value.
    """

    name: str
    value: float
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None
    interval: tuple[float, float] | None = None
    detail: str = ""
    absent: str = ""

    @classmethod
    def of(
        cls,
        name: str,
        found: Estimate,
        *,
        at_most: float | None = None,
        at_least: float | None = None,
        detail: str = "",
    ) -> Measurement:
        """``found`` with its interval."""
        return cls(name, found.value, "", at_most, at_least, (found.low, found.high), detail)

    @property
    def verdict(self) -> Verdict | None:
        """Whether the target is reached; ``None`` without a target. NaN reaches none."""
        if self.absent or (self.at_most is None and self.at_least is None):
            return None
        if self.interval is not None:
            return verdict(Estimate(self.value, *self.interval), at_least=self.at_least, at_most=self.at_most)
        if self.at_most is not None:
            return "met" if self.value <= self.at_most else "missed"
        return "met" if self.at_least is not None and self.value >= self.at_least else "missed"

    @property
    def target(self) -> str:
        if self.at_most is not None:
            return f"≤ {self.at_most:g}"
        return f"≥ {self.at_least:g}" if self.at_least is not None else ""

    def as_dict(self) -> dict[str, Any]:
        bounds = {"at_most": self.at_most, "at_least": self.at_least}
        given = {key: bound for key, bound in bounds.items() if bound is not None}
        if self.absent:
            return {"name": self.name, "absent": self.absent} | given
        judged = {} if self.verdict is None else {"verdict": self.verdict}
        interval = {} if self.interval is None else {"interval": [_finite(bound) for bound in self.interval]}
        detail = {"detail": self.detail} if self.detail else {}
        value = {"name": self.name, "value": _significant(self.value), "unit": self.unit}
        return value | detail | interval | given | judged


@dataclass(frozen=True, slots=True)
class Result:
    """All that one benchmark found. ``settings`` say how it was measured, ``notes`` what a reader should know;
    ``grids`` hold the values that are compared, side by side; ``samples`` every run of every side, by piece of work.

    A benchmark that this machine cannot run has no measurements and a reason in ``skipped``.
    """

    benchmark: str
    measurements: Sequence[Measurement] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    skipped: str = ""
    grids: Sequence[Grid] = ()
    samples: Mapping[str, Mapping[str, Samples]] = field(default_factory=dict)

    @property
    def missed(self) -> list[Measurement]:
        return [measurement for measurement in self.measurements if measurement.verdict == "missed"]


def here() -> Path:
    """Where the results of this kind of machine are kept."""
    return RESULTS / machines.key()


def content_of(result: Result, *, command: str, machine: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a result: itself, the command that made it and the machine it was made on."""
    content: dict[str, Any] = {"benchmark": result.benchmark, "command": command, "machine": machine}
    if result.skipped:
        content["skipped"] = result.skipped
    content["settings"] = result.settings
    content["measurements"] = [measurement.as_dict() for measurement in result.measurements]
    if result.grids:
        content["grids"] = [grid.as_dict() for grid in result.grids]
    content["notes"] = list(result.notes)
    if result.samples:
        content["samples_ms"] = {
            piece: {side: _written(samples) for side, samples in sides.items()}
            for piece, sides in result.samples.items()
        }
    return content


def write(content: Mapping[str, Any], directory: Path) -> Path:
    """``directory/<benchmark>.json``."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"{content['benchmark']}.json"
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")
    return file


def table(results: Iterable[Result]) -> str:
    """The results for people: one line per measurement, with its target and whether it is met."""
    rows = [("benchmark", "measurement", "value", "target", "")]
    for result in results:
        if result.skipped:
            rows.append((result.benchmark, f"skipped: {result.skipped}", "", "", ""))
        rows.extend(_row(result.benchmark, measurement) for measurement in result.measurements)
    widths = [max(len(row[column]) for row in rows if not row[1].startswith("skipped")) for column in range(5)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _row(benchmark: str, measurement: Measurement) -> tuple[str, str, str, str, str]:
    if measurement.absent:
        return benchmark, measurement.name, "–", measurement.target, f"absent: {measurement.absent}"
    judged = measurement.verdict or ""
    value = f"{_significant(measurement.value):g} {measurement.unit}".rstrip()
    if measurement.interval is not None:
        low, high = measurement.interval
        value += f" [{low:.3g}, {high:.3g}]"
    return benchmark, measurement.name, value, measurement.target, judged.upper() if judged == "missed" else judged


def _written(samples: Samples) -> list[str]:
    """One line per process: milliseconds of its runs, turns parted by commas."""
    return [", ".join(" ".join(f"{seconds * 1e3:.4g}" for seconds in turn) for turn in process) for process in samples]


def samples_of(lines: Sequence[str]) -> Samples:
    """The samples that a result's ``samples_ms`` has as ``lines``."""
    return [[[float(value) / 1e3 for value in turn.split()] for turn in line.split(",")] for line in lines]


def _finite(bound: float) -> float | None:
    """For JSON, which has neither infinity nor NaN."""
    return _significant(bound) if math.isfinite(bound) else None


def _significant(value: float) -> float:
    """Four significant digits: more would claim a precision that no benchmark has."""
    return float(f"{value:.4g}")
