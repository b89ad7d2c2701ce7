"""How a result is judged and written."""

import json
from pathlib import Path

import pytest

from bench.core.results import Measurement, Result, content_of, table, write
from bench.core.verdict import Estimate


@pytest.mark.parametrize(
    ("interval", "expected"), [(None, "met"), ((1.1, 1.3), "met"), ((0.9, 1.3), "undecided"), ((0.5, 0.99), "missed")]
)
def test_a_value_is_judged_by_its_interval_if_it_has_one(interval: tuple[float, float] | None, expected: str) -> None:
    assert Measurement("m", 1.2, at_least=1.0, interval=interval).verdict == expected


def test_a_written_result_has_every_run(tmp_path: Path) -> None:
    samples = [[[0.001, 0.002], [0.0015]], [[0.003], [0.004]]]
    found = Result(
        "one", [Measurement.of("m", Estimate(2.0, 1.0, 3.0), at_least=1.5)], samples={"work": {"a": samples}}
    )
    content = json.loads(write(content_of(found, command="c", machine={"commit": "x"}), tmp_path).read_text())
    assert content["measurements"] == [
        {"name": "m", "value": 2.0, "unit": "", "interval": [1.0, 3.0], "at_least": 1.5, "verdict": "undecided"}
    ]
    assert content["samples_ms"]["work"]["a"] == ["1 2, 1.5", "3, 4"]
    assert "undecided" in table(found)
