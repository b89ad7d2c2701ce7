from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from bf16kit.artifact.entries import DriftEntry
from bf16kit.drift.measurements import InputRange, Measurements, ProfileMeasurements, SampleColumns
from bf16kit.drift.metrics import SampleDrift
from service.drift.calibration import Calibration, rows_out_of_range

KNOWN = InputRange(low=-1.0, high=1.0)
RANGES = {"x": InputRange(low=0.0, high=1.0)}


@dataclass
class Manifest:
    """The part of a manifest that a calibration reads."""

    drift: dict[str, DriftEntry] = field(default_factory=dict)


def measured(*profiles: str) -> Measurements:
    columns = SampleColumns.of([SampleDrift(1e-3, 0, 0, 60, 0, 0, 0), SampleDrift(2e-3, 0, 0, 54, 0, 0, 0)], 10)
    found = {name: ProfileMeasurements(outputs={"y": columns}) for name in profiles}
    return Measurements(profiles=found, inputs=RANGES)


def entry(source: str) -> DriftEntry:
    return DriftEntry(samples=2, source=source, outputs={})


def test_a_calibration_holds_rows_by_profile_and_ranges_by_input() -> None:
    manifest = Manifest({"cpu": entry("sentences.npz"), "cuda": entry("sentences.npz")})
    found = Calibration.of(manifest, measured("cpu", "cuda"))  # type: ignore[arg-type]
    assert found.rows == {profile: {"y": [1e-3, 2e-3]} for profile in ("cpu", "cuda")}
    assert found.ranges == RANGES


@pytest.mark.parametrize(
    ("source", "measurements", "reason"),
    [
        ("random inputs (seed 0)", measured("cpu"), "random"),
        ("random token sequences (seed 3)", measured("cpu"), "random"),
        ("s.npz", None, "no measurements"),
    ],
)
def test_random_inputs_and_missing_measurements_set_no_expectation(
    source: str, measurements: Measurements | None, reason: str
) -> None:
    found = Calibration.of(Manifest({"cpu": entry(source)}), measurements)  # type: ignore[arg-type]
    assert (found.rows, found.ranges) == ({}, {})
    assert reason in found.missing_reason


def test_rows_out_of_range_are_reported_by_input() -> None:
    feeds = {
        "x": np.array([[0.0, 1.0], [0.0, 99.0], [np.nan, 0.0]], np.float32),
        "ids": np.array([[1], [2], [3]]),
        "text": np.array([["a"], ["b"], ["c"]], object),
    }
    found = rows_out_of_range({"x": KNOWN, "ids": InputRange(low=0.0, high=100.0)}, feeds, 3, 0)
    assert {name: rows.tolist() for name, rows in found.items()} == {"x": [False, True, True], "ids": [False] * 3}


@pytest.mark.parametrize(
    ("axis", "rows", "out"),
    [(1, 2, [False, True]), (None, 1, [True]), (0, 4, [True] * 4), (7, 2, [True] * 2)],
    ids=["along the batch axis", "no batch axis", "another number of rows", "no such axis"],
)
def test_an_input_without_rows_counts_for_all_rows(axis: int | None, rows: int, out: list[bool]) -> None:
    feeds = {"x": np.array([[0.0, 99.0], [0.0, 0.0]])}
    assert rows_out_of_range({"x": KNOWN}, feeds, rows, axis)["x"].tolist() == out


def test_an_input_that_was_not_given_or_has_no_range_is_not_judged() -> None:
    assert rows_out_of_range({"x": KNOWN}, {"other": np.ones((1, 1))}, 1, 0) == {}
