"""Damaged sources give a clear error or a correct artifact, and touch nothing outside. `make fuzz` runs 20,000."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long  # a minute of damaged sources

COUNTS = {"onnx": 30, "safetensors": 24, "torch": 30, "flax": 30, "orbax": 16}


@pytest.mark.parametrize("kind", COUNTS)
def test_mutants_are_rejected_or_converted_without_faults(tmp_path: Path, kind: str) -> None:
    """The mutants run in a separate process, because it forks, which a process with threads must not do."""
    if kind in ("flax", "orbax"):
        reader = {"flax": "msgpack", "orbax": "tensorstore"}[kind]
        pytest.importorskip(reader, reason="the extra `jax` is not installed")
    result = tmp_path / "result.json"
    first = 1_000_001  # not the mutants of the campaign
    done = subprocess.run(
        [sys.executable, "-m", "fuzzing", kind, str(first), str(COUNTS[kind]), str(result)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
    )
    assert result.is_file(), done.stdout + done.stderr
    tally = json.loads(result.read_text())
    assert not tally["faults"], "\n".join(tally["faults"])
    assert tally["count"] == COUNTS[kind]
    assert sum(count for end, count in tally["ends"].items() if end.startswith("refused")) > COUNTS[kind] / 4
    assert (
        tally["ends"].get("converted", 0) + tally["ends"].get("read and fitted", 0) > 0
    )  # few are converted completely
