"""The sizing table of docs/scaling.md: what one replica does, multiplied."""

from bench.core import publishing
from bench.serving import sizing


def test_replicas_are_multiples_of_one() -> None:
    found = publishing.every()
    one = sizing.measured(found)
    row = next(line for line in sizing.table(found).splitlines() if line.startswith("| MiniLM, 16 tokens"))
    told = [float(cell.replace(",", "")) for cell in row.split("|")[2:-1]]
    assert told == [float(f"{one.short * replicas:.2g}") for replicas in sizing.REPLICAS]


def test_what_nobody_measured_is_a_dash() -> None:
    row = next(line for line in sizing.table([]).splitlines() if line.startswith("| memory"))
    assert row == "| memory with MiniLM, no reference | – | – | – | – |"
