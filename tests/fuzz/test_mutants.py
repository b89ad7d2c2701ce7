"""Damaged sources give a clear error or a correct artifact, and touch nothing outside. `make fuzz` runs 20,000."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.long  # a minute of damaged sources

COUNTS = {"onnx": 30, "safetensors": 24, "torch": 30, "flax": 30, "orbax": 16}
READERS = {"flax": "msgpack", "orbax": "tensorstore"}  # of the extra `jax`
FIRST = 1_000_001  # not the mutants of the campaign
SLICES = """
import json, sys
from fuzzing.__main__ import main
for each in json.loads(sys.argv[1]):
    main(each)
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the results.

    The mutants run in a separate process, because it forks, which a process with threads must not do: in one for all
    kinds, because importing what a conversion needs takes longer than most mutants.
    """
    directory = tmp_path_factory.mktemp("results")
    kinds = [kind for kind in COUNTS if find_spec(READERS.get(kind, "onnx"))]
    slices = [[kind, str(FIRST), str(COUNTS[kind]), str(directory / f"{kind}.json")] for kind in kinds]
    subprocess.run(
        [sys.executable, "-c", SLICES, json.dumps(slices)],
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
    )
    return directory


@pytest.mark.parametrize("kind", COUNTS)
def test_mutants_are_rejected_or_converted_without_faults(results: Path, kind: str) -> None:
    pytest.importorskip(READERS.get(kind, "onnx"), reason="the extra `jax` is not installed")
    tally = json.loads((results / f"{kind}.json").read_text())
    assert not tally["faults"], "\n".join(tally["faults"])
    assert tally["count"] == COUNTS[kind]
    assert sum(count for end, count in tally["ends"].items() if end.startswith("refused")) > COUNTS[kind] / 4
    assert (
        tally["ends"].get("converted", 0) + tally["ends"].get("read and fitted", 0) > 0
    )  # few are converted completely
