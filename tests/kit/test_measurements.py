"""measurements.json: canonical, bounded, and checked when it is read; and the ranges of inputs that it keeps."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bf16kit.drift import measurements
from bf16kit.drift.measurements import (
    InputRange,
    LayerEntry,
    Layers,
    Measurements,
    ProfileMeasurements,
    SampleColumns,
    SearchEntry,
    SliceEntry,
    input_ranges,
    ranges,
    sample_columns,
)
from bf16kit.drift.metrics import SampleDrift
from bf16kit.messages.errors import ArtifactError
from bf16kit.numerics.rounding import Census, census

DRIFT = SampleDrift(1e-3, 1e-6, 0.01, 60.0, 3, 4, 0)


def _drifts(count: int) -> list[SampleDrift]:
    return [replace(DRIFT, relative_l2=i / 1000) for i in range(count)]


def _measured() -> Measurements:
    profile = ProfileMeasurements(
        outputs={"y": SampleColumns.of([DRIFT, replace(DRIFT, relative_l2=math.inf, nonfinite=2)], 10)},
        slices={"y": [SliceEntry(error=0.25, axis=1, index=7)]},
        layers=Layers(
            measured=1, rows=[LayerEntry(name="fc", op="MatMul", depth=1, sqnr_db=math.inf, expected_db=53.0)]
        ),
        search=SearchEntry(candidates=3, before=2.0, after=0.5, bf16_bytes=0.9, bf16_flops=0.8),
    )
    return Measurements(
        profiles={"cpu": profile},
        ranges=ranges({"w": census(np.ones(4, np.float32))}),
        inputs={"x": InputRange(low=-1.5, high=2.0, nonfinite=True)},
    )


def test_measurements_are_read_exactly_as_they_were_written() -> None:
    data = _measured().dumps()
    assert Measurements.loads(data, "m") == _measured()
    assert Measurements.loads(data, "m").dumps() == data
    assert b'"inf"' in data
    assert data.endswith(b"}\n")


def test_what_was_measured_is_written_in_seven_digits_and_what_bounds_inputs_in_all() -> None:
    """Those would make the file of a small model twice as large; an input at a rounded bound would be out of range."""
    profile = ProfileMeasurements(outputs={"y": SampleColumns.of([replace(DRIFT, relative_l2=0.00123456789)], 10)})
    inputs = {"x": InputRange(low=-0.123456789, high=123456789.0)}
    written = Measurements(profiles={"cpu": profile}, inputs=inputs).dumps()
    read = Measurements.loads(written, "m")
    assert read.profiles["cpu"].outputs["y"].relative_l2 == [0.001234568]
    assert read.inputs == inputs
    assert written.count(b"\n") == 1


def test_thousands_of_samples_are_thinned_evenly_and_their_count_is_kept() -> None:
    found = sample_columns({p: {o: _drifts(9_000) for o in "ab"} for p in ("cpu", "cuda")})
    rows = found["cpu"]["a"]
    assert rows.measured == 9_000
    assert len(rows.relative_l2) == measurements.MOST_SAMPLES // 4
    assert rows.relative_l2 == [(i * 9_000 // 2_500) / 1000 for i in range(2_500)]
    few = sample_columns({"cpu": {"a": _drifts(3)}})["cpu"]["a"]
    assert few.relative_l2 == [0.0, 0.001, 0.002]
    assert few.top1_rows == [4] * 3
    assert SampleColumns.of([replace(DRIFT, top1_matches=0, top1_rows=0)], 10).top1_rows == []  # not logits


def test_of_too_many_tensors_the_worst_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order, worst first: overflow, values flushed to zero, subnormals, values near an end of the range."""
    monkeypatch.setattr(measurements, "MOST_TENSORS", 4)
    kept = ranges(
        {
            "fine": Census(count=10, max_abs=1.0, min_abs_nonzero=0.1),
            "near the end": Census(count=10, max_abs=1e38, min_abs_nonzero=0.1),
            "subnormal": Census(count=10, subnormal=9, max_abs=1.0, min_abs_nonzero=1e-39),
            "flushed": Census(count=10, flushed_to_zero=1, max_abs=1.0, min_abs_nonzero=1e-45),
            "overflow": Census(count=10, overflow=1, max_abs=3.4e38, min_abs_nonzero=0.1),
        }
    )
    assert set(kept.tensors) == {"near the end", "subnormal", "flushed", "overflow"}
    assert kept.measured == 5
    # the last of the order is the number of binades to the nearer end of the range
    found = ranges({"w": Census(count=2, max_abs=2.0**120, min_abs_nonzero=2.0**-120), "zeros": Census(count=2)})
    assert found.tensors["w"].severity[-1] == pytest.approx(6.0)
    assert math.isinf(found.tensors["zeros"].severity[-1])


def _edit(change: Callable[[dict[str, Any]], object]) -> bytes:
    fields = json.loads(_measured().dumps())
    change(fields)
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "version None"),
        (b'{"version": 2}', "version 2, this bf16kit reads 1"),
        (_edit(lambda m: m.update(colour=1)), "colour"),
        (_edit(lambda m: m["profiles"]["cpu"]["outputs"]["y"]["relative_l2"].__setitem__(0, -1.0)), "relative_l2.0"),
        (_edit(lambda m: m["profiles"]["cpu"]["outputs"]["y"]["relative_l2"].__setitem__(0, "nan")), "relative_l2.0"),
        (_edit(lambda m: m["ranges"]["tensors"]["w"].update(max_abs="inf")), "max_abs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "data",
)
def test_an_invalid_file_is_rejected_and_named(data: bytes, said: str) -> None:
    with pytest.raises(ArtifactError, match=r"/a/measurements\.json") as raised:
        Measurements.loads(data, "/a/measurements.json")
    assert said in str(raised.value)


@settings(max_examples=300)
@given(st.data())
def test_a_damaged_file_is_rejected_or_can_be_written_and_read_again(data: st.DataObject) -> None:
    written = bytearray(_measured().dumps())
    for _ in range(data.draw(st.integers(1, 4))):
        written[data.draw(st.integers(0, len(written) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = Measurements.loads(bytes(written), "m")
    except ArtifactError:
        return
    assert Measurements.loads(found.dumps(), "m").dumps() == found.dumps()


def test_the_range_covers_all_samples_and_strings_booleans_and_empty_arrays_have_none() -> None:
    feeds = [
        {"x": np.array([[1.0, -2.0]], np.float32), "ids": np.array([5, 900])},
        {"x": np.array([[7.0]], np.float32)},
        {"words": np.array(["a"], object), "flags": np.array([True, False]), "none": np.zeros((0, 3), np.float32)},
    ]
    found = input_ranges(feeds)
    assert found == {"x": InputRange(low=-2.0, high=7.0), "ids": InputRange(low=5.0, high=900.0)}
    assert str(found["x"]) == "-2 to 7"


def test_nonfinite_values_are_in_range_only_if_the_samples_had_some() -> None:
    some, none = np.array([1.0, np.inf, np.nan]), np.array([np.nan, np.nan])
    assert input_ranges([{"x": some}]) == {"x": InputRange(low=1.0, high=1.0, nonfinite=True)}
    assert input_ranges([{"x": none}]) == {"x": InputRange(low=0.0, high=0.0, nonfinite=True)}
    assert InputRange(low=0.0, high=1.0, nonfinite=True).outside(some).tolist() == [False, False, False]
    assert InputRange(low=0.0, high=1.0).outside(some).tolist() == [False, True, True]
    assert "not finite" in str(InputRange(low=0.0, high=1.0, nonfinite=True))


def test_zero_and_values_up_to_half_a_range_beyond_the_ends_are_in_range() -> None:
    known = InputRange(low=2.0, high=10.0)  # extended to 0 to 10
    assert known.outside(np.array([-5.0, 0.0, 15.0])).any() == np.False_
    assert known.outside(np.array([-5.1, 15.1, 10 * 2.0**20])).all()
    mask = InputRange(low=1.0, high=1.0)
    assert mask.outside(np.array([0, 1, 2], np.int64)).tolist() == [False, False, True]
    bf16 = InputRange.of(np.array([1.5, -3.0], ml_dtypes.bfloat16))
    assert bf16 == InputRange(low=-3.0, high=1.5)
    assert bf16.outside(np.array([1.0, 3e38], ml_dtypes.bfloat16)).tolist() == [False, True]
