"""The one gate: what may be kept in ``bench/results``, and be quoted by README and the documentation.

``python -m bench`` writes nothing there that :func:`unfit` refuses, and a test applies it to every file that is there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.core import machine
from bench.core.results import RESULTS
from bench.core.verdict import FEWEST_PROCESSES

MOST_OTHERS = 0.05  # of the processors' time, for other programs and other machines
# What compares with no other program, or does not time: sizes, drift, what a conversion takes.
_ALONE = frozenset({"artifact_size", "conversion_speed", "kernel_drift"})


@dataclass(frozen=True, slots=True)
class Published:
    """The results of one kind of machine that are fit to be published, by benchmark."""

    key: str
    contents: Mapping[str, Mapping[str, Any]]

    def measurements(self, benchmark: str) -> Sequence[Mapping[str, Any]]:
        """Nothing where it is not published."""
        found: Sequence[Mapping[str, Any]] = self.contents.get(benchmark, {}).get("measurements", ())
        return found

    def find(self, benchmark: str, name: str) -> Mapping[str, Any] | None:
        """The measurement called ``name``."""
        return next((one for one in self.measurements(benchmark) if one["name"] == name), None)

    def where(self, benchmark: str) -> str:
        """On which machine it was measured, when, and at which commit."""
        machine = self.contents[benchmark]["machine"]
        return f"{machine['cores']} cores of {machine['cpu']} ({self.key}), {self.when(benchmark)}"

    def when(self, benchmark: str) -> str:
        machine = self.contents[benchmark]["machine"]
        return f"{machine['date']}, commit {machine['commit']}"


def unfit(content: Mapping[str, Any]) -> str:
    """Why a result is not to be published; empty when it is."""
    found, settings = content.get("machine", {}), content.get("settings", {})
    if "skipped" in content:
        return f"skipped: {content['skipped']}"
    if not content.get("command"):
        return "no command is recorded that measures it"
    if "--quick" in content["command"]:
        return "it was measured with --quick"
    if not found.get("key"):
        return "the machine has no name"
    if not found.get("clean"):
        return "the tree was not that of a commit"
    if not machine.in_history(found.get("commit", "")):
        return f"commit {found.get('commit')} is not in the history"
    if not {"other_programs", "stolen"} <= found.keys():
        return "what other programs took is not recorded"
    if (taken := found["other_programs"] + found["stolen"]) > MOST_OTHERS:
        return f"other programs took {taken:.0%} of the processors"
    processes = settings.get("processes", settings.get("rounds", 0))
    if content["benchmark"] not in _ALONE and processes < FEWEST_PROCESSES:
        return f"fewer than {FEWEST_PROCESSES} processes of each side"
    return ""


def unfit_file(file: Path) -> str:
    """The same of a file ``MACHINE/BENCHMARK.json``, whose name must say what is in it."""
    content: dict[str, Any] = json.loads(file.read_text("utf-8"))
    if reason := unfit(content):
        return reason
    named = file.parent.name, file.stem
    measured = content["machine"]["key"], content["benchmark"]
    return "" if named == measured else f"it has {measured[1]} of {measured[0]}"


def read(directory: Path) -> Published:
    """What ``directory`` has of one kind of machine."""
    files = [file for file in sorted(directory.glob("*.json")) if not unfit_file(file)]
    return Published(directory.name, {file.stem: json.loads(file.read_text("utf-8")) for file in files})


def every(root: Path = RESULTS) -> list[Published]:
    """What there is of each kind of machine."""
    found = [read(directory) for directory in sorted(root.iterdir()) if directory.is_dir()]
    return [one for one in found if one.contents]


def refusals(directory: Path) -> Iterator[str]:
    """What is there and not fit to be published, and why."""
    for file in sorted(directory.glob("*.json")):
        if reason := unfit_file(file):
            yield f"{file.stem}: {reason}"
