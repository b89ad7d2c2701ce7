"""The gate of published results: what it refuses, and that everything committed passes it."""

import json
import subprocess
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from bench.core import machine, publishing
from bench.core.results import RESULTS

FILES = sorted(RESULTS.glob("*/*.json"))
MACHINE = {"key": "k-2cpu", "commit": "", "clean": True, "other_programs": 0.01, "stolen": 0.0}
RESULT = {"benchmark": "b", "command": "python -m bench b", "machine": MACHINE, "settings": {"processes": 5}}


@pytest.fixture(scope="module")
def head() -> str:
    """Return the commit that is checked out."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=machine.ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a checkout: the history of commits is not here")
    return done.stdout.strip()


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_each_committed_result_is_fit_to_be_published(file: Path) -> None:
    assert publishing.unfit_file(file) == ""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"machine": {"clean": False}}, "not that of a commit"),
        ({"machine": {"commit": "0123456789abcdef0123456789abcdef01234567"}}, "not in the history"),
        ({"machine": {"commit": "--all"}}, "not in the history"),
        ({"machine": {"other_programs": 0.2}}, "other programs took 20% of the processors"),
        ({"machine": {"stolen": 0.06}}, "of the processors"),
        ({"machine": {"key": ""}}, "the machine has no name"),
        ({"settings": {"processes": 4}}, "fewer than 5 processes"),
        ({"command": ""}, "no command"),
        ({"command": "python -m bench b --quick"}, "with --quick"),
        ({"skipped": "no kernel"}, "no kernel"),
    ],
)
def test_a_result_is_refused_for_each_reason(head: str, change: dict[str, Any], reason: str) -> None:
    content: dict[str, Any] = deepcopy(RESULT)
    content["machine"]["commit"] = head[:8]
    for key, value in change.items():
        content[key] = content.get(key, {}) | value if isinstance(value, dict) else value
    found = publishing.unfit(content)
    assert reason in found
    assert bool(reason) == bool(found)
    for missing in MACHINE:  # each entry is needed
        without = {key: value for key, value in content["machine"].items() if key != missing}
        assert publishing.unfit(content | {"machine": without})


def test_a_commit_of_another_branch_is_refused(head: str) -> None:
    """Its object may be here; it was never merged."""
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@localhost", "commit-tree", "HEAD^{tree}", "-m", "other"]
    made = subprocess.run(command, cwd=machine.ROOT, capture_output=True, text=True, check=True).stdout.strip()
    assert not machine.in_history(made)
    assert machine.in_history(head)


def test_a_file_under_a_foreign_name_is_refused_and_not_read(tmp_path: Path, head: str) -> None:
    content: dict[str, Any] = deepcopy(RESULT)
    content["machine"]["commit"] = head
    for place, fit in (("k-2cpu/b", True), ("k-2cpu/other", False), ("k-4cpu/b", False)):
        file = tmp_path / f"{place}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(content))
        assert (publishing.unfit_file(file) == "") == fit
    assert [(one.key, *one.contents) for one in publishing.every(tmp_path)] == [("k-2cpu", "b")]
    assert list(publishing.refusals(tmp_path / "k-4cpu")) == ["b: it has b of k-2cpu"]
