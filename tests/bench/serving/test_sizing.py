"""docs/scaling.md says what is computed from the results that are there now."""

from __future__ import annotations

from bench.serving import sizing


def test_the_page_is_what_the_results_give() -> None:
    """After other results: `python -m bench.serving.sizing`."""
    assert sizing.PAGE.read_text("utf-8") == sizing.page()


def test_a_thousand_replicas_are_a_thousand_times_one() -> None:
    one = sizing.measured()
    row = next(line for line in sizing.table().splitlines() if line.startswith("| MiniLM, 16 tokens"))
    told = [float(cell.replace(",", "")) for cell in row.split("|")[2:-1]]
    assert told == [float(f"{one.short * replicas:.2g}") for replicas in sizing.REPLICAS]
