"""Collects what the attacks of ``tests/hostile`` measure, and writes the page of ``make soak`` from it.

``BF16KIT_FIGURES`` names the file to which every figure is written. ``BF16KIT_SOAK=1`` selects the long form of each
attack. ``python tests/support/figures.py FILE PAGE`` writes the page.
"""

import json
import os
import platform
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

SOAK = os.environ.get("BF16KIT_SOAK") == "1"
_HIDDEN = ("health_checks", "before", "after", "how_much", "passed", "commit")
_COLUMNS = {"how_much": "how much", "slowest": "slowest health check, ms", "most": "largest RSS, MiB"}
_HEAD = """# How reliable the server is
Written by {command} on {commits}, {cores} cores ({machine}), Python {python}: {passed} of {count} attacks passed.

Each row attacks a `bf16-serve` process over real sockets (`tests/hostile`, the row's name) while a second client polls
its health. It passes if every check was answered within a second (30 s while calls are reset), the process lives, its
memory never reached 1.5 GiB and came back to within 10 % or 16 MiB, and what the row says held.

| attack | {columns} | what else |
|---|{rule}|---|
"""


def amount(short: int, soak: int) -> int:
    """Return the size of an attack: ``short`` in CI, ``soak`` in ``make soak``."""
    return soak if SOAK else short


def record(**figures: Any) -> None:
    """Write figures of the running test to the file: those of the table's columns, and any other that it measured.

    The page shows the name of each other keyword, with spaces for underscores.
    """
    path, test = os.environ.get("BF16KIT_FIGURES"), os.environ.get("PYTEST_CURRENT_TEST", "")
    if path:
        with Path(path).open("a") as file:
            file.write(json.dumps({"test": test.split(" ")[0], "figures": figures}) + "\n")


def watched(checks: int, slowest_s: float, before: int, most: int, after: int) -> None:
    """Record the figures that all attacks have in common; memory is in bytes."""
    mib = [f"{nbytes / 2**20:.0f}" for nbytes in (before, most, after)]
    record(health_checks=checks, slowest=f"{slowest_s * 1e3:.0f}", before=mib[0], most=mib[1], after=mib[2])


def page(lines: list[str]) -> str:
    """Return the page of a run; ``lines`` are the lines that :func:`record` has written."""
    tests: dict[str, dict[str, Any]] = {}
    for line in lines:
        entry = json.loads(line)
        found = tests.setdefault(entry["test"], {})
        if "commit" in entry["figures"]:  # the test started again: its earlier figures do not count
            found.clear()
        found.update(entry["figures"])
    rows = [_row(test, found) for test, found in tests.items()]
    head = _HEAD.format(
        command="`make soak`" if SOAK else "`make test-hostile`, in the short form,",
        commits=_commits([str(found.get("commit", "")) for found in tests.values()]),
        cores=os.cpu_count(),
        machine=platform.machine(),
        python=platform.python_version(),
        passed=sum(bool(found.get("passed")) for found in tests.values()),
        count=len(tests),
        columns=" | ".join(_COLUMNS.values()),
        rule="|".join("---" for _ in _COLUMNS),
    )
    return head + "\n".join(rows) + "\n"


def _row(test: str, found: dict[str, Any]) -> str:
    name = test.split("::")[-1].removeprefix("test_").replace("_", " ")
    cells = [str(found.get(column, "")) for column in _COLUMNS]
    known = {*_COLUMNS, *_HIDDEN}
    more = [f"{key.replace('_', ' ')}: {value}" for key, value in found.items() if key not in known]
    failed = [] if found.get("passed") else ["**FAILED**"]
    return f"| {name} | {' | '.join(cells)} | {'; '.join(failed + more)} |"


def commit() -> str:
    """Return the short hash of the commit under test, for :func:`record`."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _commits(of_tests: list[str]) -> str:
    """Return the commit; if there are several, return how many attacks ran on each.

    An attack that found a defect is run again after the fix, on a later commit.
    """
    numbers = Counter(of_tests)
    if len(numbers) == 1:
        return f"commit {of_tests[0]}"
    return "commits " + ", ".join(f"{commit} ({number})" for commit, number in numbers.items())


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(page(Path(sys.argv[1]).read_text().splitlines()))
    sys.stdout.write(f"{sys.argv[2]} is written\n")
