"""Write the outcomes of a campaign into ``docs/reliability-converter.md``, between its two comments."""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_BEGIN, _END = "<!-- outcomes: written by make fuzz -->\n", "<!-- end of outcomes -->\n"
_ENDS = {"converted": "converted", "read and fitted": "read and fitted"}
_ENDS |= {f"exit {code}": f"refused ({code})" for code in (1, 2, 3)}
_COSTS = "| kind | processor seconds, mean | slowest | largest, MiB |\n|---|---|---|---|\n"
# The mutants' directory on this machine. It is left out, so that the page does not depend on the machine.
_WORK = re.compile(rf"(?:/dev/shm|/tmp|{re.escape(tempfile.gettempdir())})/(?:[^/\s'\"]+/)*")


def commit() -> str:
    """Return the short hash of the commit that is checked out."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def write(page: Path, tallies: Sequence[dict[str, Any]], of_commit: str) -> None:
    """Replace the outcomes on ``page`` by those of the slices that have these tallies."""
    before, _, rest = page.read_text("utf-8").partition(_BEGIN)
    page.write_text(before + _BEGIN + outcomes(tallies, of_commit) + _END + rest.partition(_END)[2], "utf-8")


def outcomes(tallies: Sequence[dict[str, Any]], of_commit: str) -> str:
    rows, costs = f"| kind | mutants | {' | '.join(_ENDS)} | ended otherwise |\n{'|---' * 8}|\n", _COSTS
    for kind in sorted({tally["kind"] for tally in tallies}):
        own = [tally for tally in tallies if tally["kind"] == kind]
        ends = sum((Counter(tally["ends"]) for tally in own), Counter[str]())
        count, known = ends.total(), [ends[end] for end in _ENDS.values()]
        rows += f"| {kind} | {' | '.join(f'{cell:,}' for cell in (count, *known, count - sum(known)))} |\n"
        seconds = sum(sum(tally["seconds"].values()) for tally in own) / max(count, 1)
        slowest, largest = max(tally["slowest"] for tally in own), max(tally["largest"] for tally in own)
        costs += f"| {kind} | {seconds:.2f} | {slowest[0]:.1f}: {slowest[1]} | {largest[0] >> 20}: {largest[1]} |\n"
    faults = [_WORK.sub("", fault) for tally in tallies for fault in tally["faults"]]
    listed = "".join(f"* {fault[:200]}\n" for fault in faults[:20])
    total = sum(tally["count"] for tally in tallies)
    found = f"{len(faults)} faults:\n\n{listed}" if faults else "No faults.\n"
    return f"{total:,} mutants on commit {of_commit}:\n\n{rows}\n{costs}\n{found}"
