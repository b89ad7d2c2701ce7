"""A table of one unit: what several sides reached on several pieces of work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Cells = Sequence[float | None]


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


def _cell(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value < 0.1 else f"{value:.2f}"


def _significant(value: float) -> float:
    return float(f"{value:.4g}")
