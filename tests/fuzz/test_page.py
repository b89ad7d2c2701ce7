"""The page of a campaign names its limits and its seeds."""

import os
import sys
from pathlib import Path

import pytest
from fuzzing import campaign, confined, judge
from fuzzing.seed import KINDS, seeds

PAGE = Path(__file__).parents[2] / "docs" / "reliability-converter.md"


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
