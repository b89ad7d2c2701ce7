"""Pages quote what is published, and nothing else; a result that is not fit is written nowhere that they read."""

import json
import re
import sys
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from benchmachine import MACHINE

import bench.__main__ as program
from bench import report
from bench.core import machine, publishing
from bench.core.publishing import Published
from bench.core.results import Measurement, Result

ROOT = machine.ROOT


def contents() -> dict[str, dict[str, Any]]:
    """Return results of all headlines: every ratio is missed at 1.5, and a peer is faster on 128 tokens."""
    found: dict[str, dict[str, Any]] = {}
    for _, benchmark, name in report.ROWS:
        of = found.setdefault(
            benchmark,
            {
                "benchmark": benchmark,
                "command": f"python -m bench {benchmark}",
                "machine": MACHINE,
                "settings": {"rounds": 5},
                "measurements": [],
            },
        )
        row = {"name": name, "value": 1.5, "unit": "", "interval": [1.25, 1750.0], "at_most": 1.0, "verdict": "missed"}
        of["measurements"].append(row)
    for name, ms in (("bf16kit", 2.0), ("the fastest fp32 peer", 3.0), ("the fastest bf16 peer", 1.0)):
        found["minilm"]["measurements"].append({"name": f"MiniLM 1×128: {name}", "value": ms, "unit": "ms"})
    return deepcopy(found)


@pytest.mark.parametrize("name", report.PAGES)
def test_each_page_equals_the_committed_results(name: str) -> None:
    """After new results, run `python -m bench.report`."""
    page = (ROOT / name).read_text("utf-8")
    assert report.written(name, page, publishing.every()) == page


def test_each_goal_and_each_number_of_readme_has_a_measurement_of_that_name() -> None:
    wanted = {(benchmark, name) for _, benchmark, name in report.ROWS}
    assert {(benchmark, name) for _, benchmark, parts in report.FIVE for _, name in parts} <= wanted
    for found in filter(report.one_commit, publishing.every()):
        measured = {(name, one["name"]) for name, content in found.contents.items() for one in content["measurements"]}
        assert wanted <= measured


def test_readme_has_no_table_of_numbers_that_is_not_generated() -> None:
    section = (ROOT / "README.md").read_text("utf-8").split("## What was measured")[1].split("\n## ")[0]
    by_hand = re.sub(r"<!-- (\w+): written by .*?<!-- end of \1 -->", "", section, flags=re.DOTALL)
    assert "|" not in by_hand


def test_readme_has_five_numbers_with_their_spread_and_names_the_goals_that_are_missed_by_most() -> None:
    found = contents()
    (furthest,) = [one for one in found["overload"]["measurements"] if one["name"] == "MiniLM: refused p50"]
    furthest |= {"value": 30.0, "unit": "ms"}
    text = " ".join(report.five([Published("k-2cpu", found)]).split())
    assert text.count("* **") == 5
    assert text.count("1.5 [1.25, 1,750]") == sum(len(parts) for *_, parts in report.FIVE)
    assert f"Missed: {len(report.ROWS)} of {len(report.ROWS)} goals" in text
    assert "the furthest: ten times the capacity asked: time until a rejection, p50 30 ms (≤ 1);" in text
    assert report.five([]) == report.NOTHING


def test_each_benchmark_and_result_that_the_pages_name_exists() -> None:
    pages = [ROOT / "README.md", ROOT / "Makefile", *sorted((ROOT / "docs").rglob("*.md"))]
    text = "\n".join(page.read_text("utf-8") for page in pages)
    for names in re.findall(r"python -m bench((?: [a-z_]+)+)", text):
        assert set(names.split()) <= {*program.MODULES, *program.GROUPS}
    for module in re.findall(r"python -m (bench\.[a-z_.]*[a-z])", text):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists(), module
    for pattern in re.findall(r"bench/results/(\S+?\.json)", text):
        assert list((ROOT / "bench" / "results").glob(pattern)), pattern


def test_the_numbers_are_rows_with_their_intervals_and_losses() -> None:
    text = report.numbers([Published("k-2cpu", contents())])
    assert "**2 cores of Test CPU (k-2cpu), 2026-01-02, commit abc1234.**" in text
    assert text.count("| 1.5 [1.25, 1,750] | ≤ 1 | **missed** |") == len(report.ROWS)
    assert "fastest of all: MiniLM 1×128 (1 ms, bf16 peer; we 2)." in text
    assert sum("p99 ÷ off" in line for line in text.splitlines()) == 4


def test_numbers_of_two_commits_or_with_one_missing_are_not_shown() -> None:
    other = contents()
    other["overload"]["machine"] = MACHINE | {"commit": "abc1235"}
    missing = {name: content for name, content in contents().items() if name != "overload"}
    assert report.numbers([Published("k-2cpu", other), Published("k-2cpu", missing)]) == report.NOTHING


@pytest.mark.parametrize(
    "change", [{}, {"clean": False}, {"commit": "0" * 40}, {"other_programs": 0.1}, {"stolen": 0.1}, {"key": "k-4cpu"}]
)
def test_a_tampered_result_is_quoted_by_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    monkeypatch.setattr(machine, "in_history", lambda commit: commit == MACHINE["commit"])
    for name, content in contents().items():
        file = tmp_path / "results" / "k-2cpu" / f"{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        content["machine"] = MACHINE | change
        file.write_text(json.dumps(content), "utf-8")
    for name in report.PAGES:
        page = tmp_path / "tree" / name
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text((ROOT / name).read_text("utf-8"), "utf-8")
    assert report.main(["--results", str(tmp_path / "results"), "--into", str(tmp_path / "tree")]) == 0
    quoted = [
        "abc1234" in (tmp_path / "tree" / name).read_text("utf-8") for name in ("README.md", "docs/benchmarks.md")
    ]
    assert quoted == [not change] * 2


@pytest.mark.parametrize(("clean", "quick"), [(True, False), (False, False), (True, True)])
def test_only_a_fit_result_is_written_among_the_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean: bool, quick: bool
) -> None:
    fake = ModuleType("bench.fake")
    fake.measure = lambda workspace, quick: Result(  # type: ignore[attr-defined]
        "b", [Measurement("m", 1.0)], settings={"processes": 5}
    )
    monkeypatch.setitem(sys.modules, "bench.fake", fake)
    monkeypatch.setitem(program.MODULES, "b", "fake")
    monkeypatch.setattr(program, "UNPUBLISHED", tmp_path / "unpublished")
    monkeypatch.setattr(machine, "describe", lambda: MACHINE | {"clean": clean})
    monkeypatch.setattr(machine, "unchanged", lambda described: True)
    monkeypatch.setattr(machine, "in_history", lambda commit: True)
    monkeypatch.setattr(machine, "adopt_orphans", lambda: None)  # not of this process' children
    monkeypatch.setattr(machine, "own_seconds", lambda: 0.0)
    monkeypatch.setattr(machine.OtherProgramsTime, "shares", lambda self: {"other_programs": 0.0, "stolen": 0.0})
    results = tmp_path / "results" / "k-2cpu"
    flags = ["b", "--workspace", str(tmp_path), "--results", str(results), *(["--quick"] if quick else [])]
    fit = clean and not quick
    assert program.main(flags) == (0 if fit or quick else 1)
    assert (results / "b.json").exists() == fit
    assert (tmp_path / "unpublished" / "b.json").exists() != fit


def test_a_benchmark_that_a_signal_ends_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = tmp_path / "python"
    killed.write_text("#!/bin/sh\nkill -9 $$\n")
    killed.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(killed))
    assert program.main(["memory", "served", "--workspace", str(tmp_path)]) == 1
