"""docs/scaling.md equals what is computed from the current results."""

from __future__ import annotations

from bench.core import publishing
from bench.serving import sizing


def test_the_page_equals_what_is_computed_from_the_results() -> None:
    """After new results, run `python -m bench.serving.sizing`."""
    assert sizing.PAGE.read_text("utf-8") == sizing.page()


def test_replicas_are_multiples_of_one() -> None:
    found = publishing.every()
    one = sizing.measured(found)
    row = next(line for line in sizing.table(found).splitlines() if line.startswith("| MiniLM, 16 tokens"))
    told = [float(cell.replace(",", "")) for cell in row.split("|")[2:-1]]
    assert told == [float(f"{one.short * replicas:.2g}") for replicas in sizing.REPLICAS]
