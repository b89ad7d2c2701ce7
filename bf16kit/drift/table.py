"""Measured drift beside its budget, as users look at it: by name, as text, in a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from bf16kit.drift.verdicts import DriftRow, format_budget_ratio
from bf16kit.messages.wording import html_table, table

COLUMNS = ("profile", "output", "metric", "measured", "worst", "budget", "used", "within")


class Drift(Mapping[str, Mapping[str, Mapping[str, float]]]):
    """Drift by profile, output and metric: ``drift["cpu"]["logits"]["relative_l2"]``.

    ``rows`` have all of it, bounds included. ``print`` shows them as a table, and a notebook as one in HTML.
    """

    def __init__(self, rows: Iterable[DriftRow]) -> None:
        self.rows = tuple(rows)

    @property
    def within(self) -> bool:
        """Whether all of it is within budget."""
        return not self.over

    @property
    def over(self) -> tuple[DriftRow, ...]:
        """The rows over budget."""
        return tuple(row for row in self.rows if not row.within)

    def __getitem__(self, profile: str) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}
        for row in (row for row in self.rows if row.profile == profile):
            found.setdefault(row.output, {})[row.metric] = row.measured
        if not found:
            raise KeyError(profile)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(row.profile for row in self.rows))

    def __len__(self) -> int:
        return len(list(iter(self)))

    @property
    def _title(self) -> str:
        return f"Drift, {'within' if self.within else 'OVER'} budget"

    def __repr__(self) -> str:
        return table(self._title, COLUMNS, map(cells, self.rows))

    def _repr_html_(self) -> str:
        return html_table(self._title, COLUMNS, map(cells, self.rows))


def cells(row: DriftRow) -> tuple[object, ...]:
    """Return one row of a table with the columns :data:`COLUMNS`."""
    profile = f"{row.profile}, emulated" if row.emulated else row.profile
    used = "–" if row.used is None else format_budget_ratio(row.used)
    return profile, row.output, row.metric, row.measured, row.worst, row.bound, used, "yes" if row.within else "NO"
