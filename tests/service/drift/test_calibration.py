from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bf16kit.artifact.entries import DriftEntry
from bf16kit.drift.measurements import InputRange, Measurements, ProfileMeasurements, SampleColumns
from bf16kit.drift.metrics import SampleDrift
from bf16kit.service.drift.comparison import rows_out_of_range
from bf16kit.service.drift.detector import Calibration

KNOWN = InputRange(low=-1.0, high=1.0)
COLUMNS = SampleColumns.of([SampleDrift(1e-3, 0, 0, 60, 0, 0, 0), SampleDrift(2e-3, 0, 0, 54, 0, 0, 0)], 10)
MEASURED = Measurements(profiles={"cpu": ProfileMeasurements(outputs={"y": COLUMNS})}, inputs={"x": KNOWN})


@pytest.mark.parametrize(
    ("source", "measurements", "reason"),
    [
        ("sentences.npz", MEASURED, ""),
        ("random inputs (seed 0)", MEASURED, "random"),
        ("random token sequences (seed 3)", MEASURED, "random"),
        ("sentences.npz", None, "no measurements"),
    ],
)
def test_drift_and_ranges_are_those_of_the_conversion_unless_its_inputs_were_random(
    source: str, measurements: Measurements | None, reason: str
) -> None:
    manifest: Any = SimpleNamespace(drift={"cpu": DriftEntry(samples=2, source=source, outputs={})})
    found = Calibration.of(manifest, measurements)
    assert found.rows == ({} if reason else {"cpu": {"y": [1e-3, 2e-3]}})
    assert found.ranges == ({} if reason else {"x": KNOWN})
    assert reason in found.missing_reason


def test_rows_out_of_range_are_reported_by_input() -> None:
    feeds = {
        "x": np.array([[0.0, 1.0], [0.0, 99.0], [np.nan, 0.0]], np.float32),
        "ids": np.array([[1], [2], [3]]),
        "text": np.array([["a"], ["b"], ["c"]], object),
    }
    ranges = {"x": KNOWN, "ids": InputRange(low=0.0, high=100.0), "not given": KNOWN}
    found = rows_out_of_range(ranges, feeds, 3, 0)
    assert {name: rows.tolist() for name, rows in found.items()} == {"x": [False, True, True], "ids": [False] * 3}


@pytest.mark.parametrize(
    ("axis", "rows", "out"),
    [(1, 2, [False, True]), (None, 1, [True]), (0, 4, [True] * 4), (7, 2, [True] * 2)],
    ids=["along the batch axis", "no batch axis", "another number of rows", "no such axis"],
)
def test_an_input_without_rows_counts_for_all_rows(axis: int | None, rows: int, out: list[bool]) -> None:
    feeds = {"x": np.array([[0.0, 99.0], [0.0, 0.0]])}
    assert rows_out_of_range({"x": KNOWN}, feeds, rows, axis)["x"].tolist() == out
