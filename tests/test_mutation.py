"""The mutation score counts the faults that tests notice, and leaves the package as it was."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = """
def clamp(value: int, most: int) -> int:
    if value > most:
        return most
    return value
"""
TEST = "from toy.clamped import clamp\n\ndef test_a_large_value_is_clamped():\n    assert clamp(9, 5) == 5\n"
MORE = "\ndef test_a_small_value_is_left():\n    assert clamp(3, 5) == 3\n"


@pytest.mark.long
def test_a_fault_that_no_test_notices_survives_until_one_does(tmp_path: Path) -> None:
    module, test = tmp_path / "toy" / "clamped.py", tmp_path / "test_toy.py"
    module.parent.mkdir()
    module.write_text(SOURCE)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "support")}

    def outcomes(tests: str, *more: str) -> dict[str, str]:
        test.write_text(tests)
        command = [sys.executable, "-m", "mutation", "toy", "test_toy.py", "--out", "out.json", *more]
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=300)
        return {one["text"]: one["outcome"] for one in json.loads((tmp_path / "out.json").read_text())}

    found = outcomes(TEST)
    assert found["return value -> return None"] == "survived"
    assert found["return most -> return None"] == "killed"
    assert found["value > most -> value >= most"] == "survived"
    assert outcomes(TEST + MORE)["return value -> return None"] == "killed"
    (tmp_path / "out.json").rename(tmp_path / "earlier.json")
    again = outcomes(TEST, "--again", "earlier.json")
    assert "value > most -> value >= most" not in again
    assert again["return value -> return None"] == "survived"
    assert module.read_text() == SOURCE
