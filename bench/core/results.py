"""What a benchmark found: measurements with their targets, and the JSON file and table they are read from."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.core import machine as machines
from bench.core.cells import row
from bench.core.verdict import Estimate, Samples, Verdict, verdict

RESULTS = Path(__file__).parents[1] / "results"
Cells = Sequence[float | None]


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
class Grid:
    """``rows`` maps what was done to one value per column; ``None`` where a side took no part."""

    title: str
    unit: str
    columns: Sequence[str]
    rows: Mapping[str, Cells]

    def as_dict(self) -> dict[str, Any]:
        rows = {
            label: [None if value is None else _significant(value) for value in row] for label, row in self.rows.items()
        }
        return {"title": self.title, "unit": self.unit, "columns": list(self.columns), "rows": rows}

    def text(self) -> str:
        """For people: three significant digits, a dash for what was not measured."""
        lines = [("", *self.columns), *((label, *map(_cell, row)) for label, row in self.rows.items())]
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        head = f"{self.title}{', ' if self.unit else ''}{self.unit}"
        body = ["  ".join((line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:]))) for line in lines]
        return "\n".join([head, *body])


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


def table(result: Result) -> str:
    """The result for people: one line per measurement, with its goal and whether it is met."""
    if result.skipped:
        return f"{result.benchmark}: skipped: {result.skipped}"
    return "\n".join([f"{result.benchmark}:", *(row(one.name, one.as_dict()) for one in result.measurements)])


def _cell(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value < 0.1 else f"{value:.2f}"


def _written(samples: Samples) -> list[str]:
    """One line per process: milliseconds of its runs, turns parted by commas."""
    return [", ".join(" ".join(f"{seconds * 1e3:.4g}" for seconds in turn) for turn in process) for process in samples]


def _finite(bound: float) -> float | None:
    """For JSON, which has neither infinity nor NaN."""
    return _significant(bound) if math.isfinite(bound) else None


def _significant(value: float) -> float:
    """Four significant digits: more would claim a precision that no benchmark has."""
    return float(f"{value:.4g}")
