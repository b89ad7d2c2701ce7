"""Compares several servers: ``oip-conformance --compare NAME=FILE.json[,FILE.json] …`` prints tables.

Several files for one server are from runs between restarts. A later result replaces an earlier one unless it was
skipped.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oip_conformance.models import UsageError
from oip_conformance.reports import cell

Run = Mapping[str, Mapping[str, Any]]  # check id → the check's entry in the output of ``--json``
_MARKS = {"pass": "✓", "FAIL": "**✗**", "told": "told", "skip": "–"}


def tables(arguments: Sequence[str]) -> str:
    """Return the tables for arguments ``NAME=FILE.json[,FILE.json]``. Raises :class:`UsageError`."""
    runs = {name: _read(files) for name, _, files in (argument.partition("=") for argument in arguments)}
    if not all(runs.values()):
        raise UsageError("--compare: expected NAME=FILE.json[,FILE.json] …, each file from --json")
    return "\n".join([*_counts(runs), "", *_broken(runs), "", *_all(runs), ""])


def _read(files: str) -> Run:
    run: dict[str, Mapping[str, Any]] = {}
    for file in filter(None, files.split(",")):
        try:
            checks = {check["id"]: check for check in json.loads(Path(file).read_text())["checks"]}
        except (ValueError, LookupError, TypeError):
            raise UsageError(f"--compare: {file} is not a file from --json") from None
        run |= {id: check for id, check in checks.items() if id not in run or check["outcome"] != "skip"}
    return run


def _counts(runs: Mapping[str, Run]) -> list[str]:
    lines = ["| server | passed | MUST broken | TRITON broken | told | skipped |", "|---|---|---|---|---|---|"]
    for name, run in runs.items():
        counts = Counter(check["outcome"] for check in run.values())
        broken = Counter(check["level"] for check in run.values() if check["outcome"] == "FAIL")
        cells = (name, counts["pass"], broken["MUST"], broken["TRITON"], counts["told"], counts["skip"])
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def _broken(runs: Mapping[str, Run]) -> list[str]:
    """Return a table of broken written rules, with what was expected and what came."""
    lines = ["| written rule broken | by | what came |", "|---|---|---|"]
    for name, run in runs.items():
        for id, check in run.items():
            if check["outcome"] == "FAIL" and check["level"] == "MUST":
                outcome = f"expected {check['expected']}; came {check['came']}"
                lines.append(f"| `{id}`: {check['rule']} | {name} | {cell(outcome, 120)} |")
    return lines


def _all(runs: Mapping[str, Run]) -> list[str]:
    """Return a table with a row per rule; problems of a rejection's status and text are in the same cell."""
    lines = ["| rule | level | " + " | ".join(runs) + " |", "|---|---|" + "---|" * len(runs)]
    every: dict[str, Mapping[str, Any]] = {}
    for run in runs.values():
        every |= {id: check for id, check in run.items() if id not in every}
    for id, check in every.items():
        if "/" not in id:
            cells = [_mark(run, id) for run in runs.values()]
            lines.append(f"| `{id}` {cell(check['rule'], 400)} | {check['level']} | " + " | ".join(cells) + " |")
    return lines


def _mark(run: Run, id: str) -> str:
    if id not in run:
        return _MARKS["skip"]
    mark = _MARKS[run[id]["outcome"]]
    status, text = run.get(f"{id}/status"), run.get(f"{id}/text")
    if run[id]["outcome"] == "pass" and status is not None:
        mark += " **status**" if status["outcome"] == "FAIL" else ""
        mark += " text" if text is not None and text["outcome"] == "told" else ""
    return mark
