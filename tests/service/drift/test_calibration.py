from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from bf16kit.artifact.entries import DriftEntry
from bf16kit.drift.measurements import InputRange, Measurements, ProfileMeasurements, SampleColumns
from bf16kit.drift.metrics import SampleDrift
from service.drift.calibration import Calibration

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


@pytest.mark.parametrize("source", ["random inputs (seed 0)", "random token sequences (seed 3)"])
def test_measurements_on_random_inputs_say_nothing_about_live_inputs(source: str) -> None:
    found = Calibration.of(Manifest({"cpu": entry(source)}), measured("cpu"))  # type: ignore[arg-type]
    assert (found.rows, found.ranges) == ({}, {})
    assert "random" in found.missing_reason


def test_an_artifact_without_measurements_sets_no_expectation() -> None:
    found = Calibration.of(Manifest({"cpu": entry("s.npz")}), None)  # type: ignore[arg-type]
    assert (found.rows, found.ranges) == ({}, {})
    assert "no measurements" in found.missing_reason
