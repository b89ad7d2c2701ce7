"""The table of docs/recovering.md has a row for each case, and is written between the marks on the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.conversion import recovery
from bench.conversion.recovery import CASES, main, table
from bf16kit.artifact.entries import LookEntry, RecoveredDrift, RecoveryEntry, TrainingEntry

_TRAINING = TrainingEntry(
    steps=1, skipped=0, precision="32-true", computed="float32", device="cpu", loss="distillation", loss_first=1.0,
    loss_last=0.5, learning_rate=1e-3, scaling="none", scale_first=1.0, scale_last=1.0, weights=1,
    looks=[LookEntry(step=0, loss=4e-4)],
)  # fmt: skip


def _values() -> dict[str, float]:
    found: dict[str, float] = {}
    for case in CASES:
        entry = RecoveryEntry(
            recovered_from="0" * 64,
            judged_on="x",
            samples=1,
            held_out=True,
            training=_TRAINING,
            drift=[
                RecoveredDrift(
                    profile=case.profile, output="y", metric="relative_l2", before=0.5, after=0.01, own=0.0, bound=0.015
                )
            ],
        )
        right = {"fp32": 0.99, "bf16": 0.9, "recovered": 0.98}
        found |= {row.name: row.value for row in recovery._measured(case, entry, right)}
    return found


def test_every_case_has_a_row() -> None:
    rows = table(_values()).splitlines()
    assert len(rows) == 2 + len(CASES)
    assert rows[2] == "| cnn | 1024 | 32-true | cpu | 0.990 | 0.900 | 0.980 | 0.5 | 0.02 | 0.01 |"


def test_the_page_is_written_between_its_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "recovering.md"
    page.write_text(recovery._PAGE.read_text("utf-8"), "utf-8")
    monkeypatch.setattr(recovery, "_PAGE", page)
    rows = [{"name": name, "value": value} for name, value in _values().items()]
    content = {"command": "python -m bench recovery", "machine": {"date": "2026-01-01"}, "measurements": rows}
    (tmp_path / "recovery.json").write_text(json.dumps(content))
    assert main([str(tmp_path)]) == 0
    once = page.read_text("utf-8")
    assert table(_values()) in once
    assert main([str(tmp_path)]) == 0
    assert page.read_text("utf-8") == once
