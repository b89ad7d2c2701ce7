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

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Grid:
        """The grid that :meth:`as_dict` wrote."""
        return cls(content["title"], content["unit"], tuple(content["columns"]), dict(content["rows"]))

    def ratios_to(self, column: str) -> Grid:
        """``column``'s values, then those divided by each other column's: of times, how many times as fast it is."""
        base = self.columns.index(column)
        others = [index for index in range(len(self.columns)) if index != base]
        rows = {
            label: [row[base], *(_ratio(row[base], row[index]) for index in others)] for label, row in self.rows.items()
        }
        return Grid(self.title, "", (f"{column}, {self.unit}", *(self.columns[index] for index in others)), rows)

    def text(self) -> str:
        """For people: three significant digits, a dash for what was not measured."""
        lines = [("", *self.columns), *((label, *map(_cell, row)) for label, row in self.rows.items())]
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        head = f"{self.title}{', ' if self.unit else ''}{self.unit}"
        body = ["  ".join((line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:]))) for line in lines]
        return "\n".join([head, *body])


def _ratio(base: float | None, value: float | None) -> float | None:
    return None if base is None or value is None else base / value


def _cell(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value < 0.1 else f"{value:.2f}"


def _significant(value: float) -> float:
    return float(f"{value:.4g}")
