"""What the page of a campaign says, and what it must not reveal."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from fuzzing import page
from fuzzing.seed import KINDS, seeds


def _tally(*faults: str) -> dict[str, Any]:
    return {
        "kind": "onnx",
        "count": 4,
        "ends": {"converted": 1, "refused (2)": 2, "FAULT": 1},
        "faults": list(faults),
        "seconds": {"converted": 1.0, "refused (2)": 1.0},
        "slowest": [1.5, "onnx 2 (mlp: dims)"],
        "largest": [3 << 20, "onnx 3 (mlp: grow)"],
    }


def test_a_row_counts_how_the_mutants_ended() -> None:
    written = page.of([_tally(), _tally()], "abc1234")
    assert "| onnx | 8 | 2 | 0 | 0 | 4 | 0 | 2 |" in written
    assert "| onnx | 0.50 | 1.5: onnx 2 (mlp: dims) | 3: onnx 3 (mlp: grow) |" in written
    assert "No faults." in written
    assert "on commit abc1234." in written
    assert "converted with `--format onnx --no-report --no-search`" in written


def test_the_published_page_has_the_current_text() -> None:
    """Only the text about the limits is compared, not the numbers: it may have changed since the last campaign."""
    published = (Path(__file__).parents[2] / "docs" / "reliability-converter.md").read_text("utf-8")
    written = page.of([_tally()], "abc1234")
    said = [text.split("In both cases")[1].split("| kind |")[0] for text in (published, written)]
    assert said[0] == said[1]


@pytest.mark.parametrize("directory", ["/dev/shm/bf16kit-fuzz-a1/cases/case/in", "/tmp/bf16kit-fuzz-b2/case/in"])
def test_the_directories_of_the_machine_are_not_on_the_page(directory: str) -> None:
    fault = f"onnx 7 (mlp: any_field): is 647 characters long: '{directory}/m.onnx: does not run on {directory}/w.bin'"
    written = page.of([_tally(fault, "onnx 8 (mlp: external): outside: open read /etc/hostname")], "abc1234")
    assert "2 faults:" in written
    assert "is 647 characters long: 'm.onnx: does not run on w.bin'" in written
    assert "outside: open read /etc/hostname" in written
    assert "/dev/shm" not in written
    assert "/tmp" not in written


_CALLED = {"onnx": "ONNX", "flax": "Flax", "orbax": "Orbax"}


@pytest.mark.long  # torch and Orbax write the seeds
@pytest.mark.parametrize("kind", KINDS)
def test_the_page_states_the_number_of_seeds_of_each_kind(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))  # another process writes Orbax's seeds
    if kind in ("flax", "orbax"):
        reader = {"flax": "msgpack", "orbax": "tensorstore"}[kind]
        pytest.importorskip(reader, reason="the extra `jax` is not installed")
    name = _CALLED.get(kind, kind)
    assert f"{len(seeds(kind))} {name}" in page.SEEDS
    assert name in page.of([_tally()], "abc1234").partition("(13 ONNX")[0]
