"""What a benchmark found: measurements with their targets, and the JSON file and table they are read from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.core import machine as machines
from bench.core.grid import Grid

_RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One number. With ``at_most`` or ``at_least`` it is judged; without, it is there to explain those that are."""

    name: str
    value: float
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; ``None`` without a target. NaN reaches none."""
        if self.at_most is not None:
            return self.value <= self.at_most
        if self.at_least is not None:
            return self.value >= self.at_least
        return None

    @property
    def target(self) -> str:
        if self.at_most is not None:
            return f"≤ {self.at_most:g}"
        return f"≥ {self.at_least:g}" if self.at_least is not None else ""

    def as_dict(self) -> dict[str, Any]:
        bounds = {"at_most": self.at_most, "at_least": self.at_least}
        given = {key: bound for key, bound in bounds.items() if bound is not None}
        verdict = {} if self.met is None else {"met": self.met}
        return {"name": self.name, "value": _significant(self.value), "unit": self.unit} | given | verdict


@dataclass(frozen=True, slots=True)
class Result:
    """All that one benchmark found. ``settings`` say how it was measured, ``notes`` what a reader should know;
    ``grids`` hold the values that are compared, side by side.

    A benchmark that this machine cannot run has no measurements and a reason in ``skipped``.
    """

    benchmark: str
    measurements: Sequence[Measurement] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    skipped: str = ""
    grids: Sequence[Grid] = ()

    @property
    def missed(self) -> list[Measurement]:
        return [measurement for measurement in self.measurements if measurement.met is False]


def here() -> Path:
    """Where the results of this kind of machine are kept."""
    return _RESULTS / machines.key()


def write(result: Result, directory: Path, *, command: str, machine: Mapping[str, Any]) -> Path:
    """``directory/<benchmark>.json``: the result, the command that made it and the machine it was made on."""
    directory.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {"benchmark": result.benchmark, "command": command, "machine": machine}
    if result.skipped:
        content["skipped"] = result.skipped
    content["settings"] = result.settings
    content["measurements"] = [measurement.as_dict() for measurement in result.measurements]
    if result.grids:
        content["grids"] = [grid.as_dict() for grid in result.grids]
    content["notes"] = list(result.notes)
    file = directory / f"{result.benchmark}.json"
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
    verdict = {True: "met", False: "MISSED", None: ""}[measurement.met]
    value = f"{_significant(measurement.value):g} {measurement.unit}".rstrip()
    return benchmark, measurement.name, value, measurement.target, verdict


def _significant(value: float) -> float:
    """Four significant digits: more would claim a precision that no benchmark has."""
    return float(f"{value:.4g}")
