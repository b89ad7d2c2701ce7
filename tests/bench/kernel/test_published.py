"""Published results: only fit ones, text generated exactly from them, and losses stated as clearly as wins."""

import json
from pathlib import Path
from typing import Any

import pytest
from benchmachine import MACHINE

from bench.core import machine, publishing
from bench.core.publishing import Published
from bench.core.results import content_of
from bench.kernel import published
from bench.kernel.compare import Goal, result
from bench.kernel.turns import FULL, Timed

GOALS = [
    Goal("1 row", "cpu", "best fp32 peer", 1.5),
    Goal("4 rows", "cpu", "best fp32 peer", 1.5),
    Goal("8 rows", "cpu", "best fp32 peer", 1.5),
    Goal("8 rows", "cpu-bf16", "best bf16 peer", 1.0),
]


def timed() -> Timed:
    """Return times: we are twice as fast at 1 row, 4 rows are undecided, and a peer is twice as fast at 8 rows."""
    samples: dict[str, Any] = {}
    for work, peer in (("1 row", [2.0] * 5), ("4 rows", [0.5, 2.0, 1.0, 0.7, 1.5]), ("8 rows", [0.5] * 5)):
        samples[work] = {"OpenVINO fp32": [[[seconds]] * 3 for seconds in peer], "cpu, avx512f": [[[1.0]] * 3] * 5}
    return Timed(samples, absent={"cpu-bf16": "not made"})


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Published:
    """Return the layers' result as it is read for publishing; its commit counts as one of the history."""
    monkeypatch.setattr(machine, "in_history", lambda commit: commit == MACHINE["commit"])
    made = result("kernel", timed(), GOALS, title="t", effort=FULL, settings={})
    (tmp_path / "k-2cpu").mkdir()
    (tmp_path / "k-2cpu" / "kernel.json").write_text(json.dumps(content_of(made, command="c", machine=MACHINE)))
    read = publishing.read(tmp_path / "k-2cpu")
    assert read.contents
    return read


def test_the_claim_lists_where_we_are_faster_undecided_and_slower(found: Published) -> None:
    assert max(map(len, published.claim([found]).splitlines())) <= 120
    text = " ".join(published.claim([found]).split())
    assert "**Faster than fp32 on CPUs in 1 of 3 cases.**" in text
    assert "1 row (2.00); no difference seen: 4 rows (1.01); slower: 8 rows (0.50)." in text
    assert "2 cores of Test CPU (k-2cpu), 2026-01-02, commit abc1234" in text


def test_the_tables_list_missed_goals_and_where_peers_win(found: Published) -> None:
    text = published.tables([found])
    assert "1 met, 1 missed, 1 undecided, 1 not measured." in text
    assert "Missed: 8 rows: best fp32 peer ÷ cpu 0.5 (≥ 1.5)." in text
    assert "fastest of all, by the medians: 8 rows (OpenVINO fp32)." in text
    assert "| 1 row | **1000** | – | – | 2000 · 2000 |" in text
    goals = published.goals([found])
    assert "| 1 row: best fp32 peer ÷ cpu, cpu, avx512f against OpenVINO fp32 | 2 [2, 2] | ≥ 1.5 | met |" in goals
    assert "| 8 rows: best bf16 peer ÷ cpu-bf16 | – | ≥ 1 | not measured: not made |" in goals
