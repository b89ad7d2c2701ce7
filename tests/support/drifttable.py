"""Writes the table of faults in docs/drift.md from the measurements of ``tests/e2e/test_drift_faults.py``.

``BF16KIT_FAULTS`` names the file to which the tests write every row. ``python tests/support/drifttable.py FILE PAGE``
puts the table into the page, between its two marks.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

BEGIN, END = "<!-- faults: written by make bench-drift -->\n", "<!-- end of faults -->\n"
LONG = bool(os.environ.get("BF16KIT_FAULTS"))  # more requests before each fault, and the alerts wait as in production


class Row(NamedTuple):
    """One fault and its effects. ``samples`` is how many samples were measured until the fault was detected."""

    fault: str
    seen_by: str
    samples: str
    alerts: str
    action: str


def named(alerts: Mapping[str, float]) -> str:
    """Return the alerts and, if they wait as in production, the seconds after which each fired."""
    return ", ".join(f"{name} ({seconds:.0f} s)" if LONG else name for name, seconds in sorted(alerts.items()))


def record(row: Row) -> None:
    """Append the row to the file that ``BF16KIT_FAULTS`` names, if it is set."""
    path = os.environ.get("BF16KIT_FAULTS")
    if path:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def table(rows: list[Row]) -> str:
    """Return the table as Markdown: the newest row of each fault, in the order of the first rows."""
    newest = {row.fault: row for row in rows}
    lines = ["| fault | seen by | samples until | alerts | the server |", "|---|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in newest.values()]
    return "\n".join(lines) + "\n"


def placed(page: str, text: str) -> str:
    """Return the page with the text between its marks replaced by ``text``."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + text + END + after


def listed(page: str) -> list[str]:
    """Return the faults in the page's table."""
    lines = page.partition(BEGIN)[2].partition(END)[0].splitlines()[2:]
    return [line.split(" | ")[0].removeprefix("| ") for line in lines]


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    found = [Row(*json.loads(line)) for line in source.read_text("utf-8").splitlines()]
    target.write_text(placed(target.read_text("utf-8"), table(found)), "utf-8")
