"""What the page of a campaign says, and what it must not reveal."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from fuzzing import campaign, confined, judge, page
from fuzzing.seed import KINDS, seeds

PAGE = Path(__file__).parents[2] / "docs" / "reliability-converter.md"


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


@pytest.mark.parametrize("directory", ["/dev/shm/bf16kit-fuzz-a1/cases/case/in", "/tmp/bf16kit-fuzz-b2/case/in"])
def test_outcomes_are_counted_and_no_directories_of_the_machine_are_on_the_page(tmp_path: Path, directory: str) -> None:
    written = tmp_path / "page.md"
    written.write_text(PAGE.read_text("utf-8"))
    page.write(written, [_tally(), _tally()], "abc1234")
    assert "| onnx | 8 | 2 | 0 | 0 | 4 | 0 | 2 |" in written.read_text("utf-8")
    assert "| onnx | 0.50 | 1.5: onnx 2 (mlp: dims) | 3: onnx 3 (mlp: grow) |" in written.read_text("utf-8")
    assert "8 mutants on commit abc1234:" in written.read_text("utf-8")
    assert "No faults." in written.read_text("utf-8")
    fault = f"onnx 7 (mlp: any_field): is 647 characters long: '{directory}/m.onnx: does not run on {directory}/w.bin'"
    page.write(written, [_tally(fault, "onnx 8 (mlp: external): outside: open read /etc/hostname")], "abc1234")
    text = written.read_text("utf-8")
    for words in ("2 faults:", "long: 'm.onnx: does not run on w.bin'", "open read /etc/hostname", "## SIGKILL"):
        assert words in text
    assert not any(place in text for place in ("/dev/shm", "/tmp", "aaca0d1"))


def test_the_page_names_the_limits() -> None:
    text = " ".join(PAGE.read_text("utf-8").split())
    assert f"takes at most {confined.SECONDS} s of processor time and {confined.MEMORY >> 30} GiB" in text
    assert f"more than {confined.PATIENCE} s of wall-clock time" in text
    assert f"one message of at most {judge.LONGEST} characters" in text
    assert f"`{' '.join(campaign.COMMON)}`" in text
    assert f"{campaign.CONVERTED_SHARE * 100:.0f} % are converted" in text


@pytest.mark.long  # torch and Orbax write the seeds
@pytest.mark.parametrize("kind", KINDS)
def test_the_page_states_the_number_of_seeds_of_each_kind(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))  # another process writes Orbax's seeds
    if kind in ("flax", "orbax"):
        reader = {"flax": "msgpack", "orbax": "tensorstore"}[kind]
        pytest.importorskip(reader, reason="the extra `jax` is not installed")
    name = {"onnx": "ONNX", "flax": "Flax", "orbax": "Orbax"}.get(kind, kind)
    assert f"{len(seeds(kind))} {name}" in PAGE.read_text("utf-8")
