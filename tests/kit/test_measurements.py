"""measurements.json: canonical, bounded, and checked when it is read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bf16kit.drift import measurements
from bf16kit.drift.inputranges import InputRange
from bf16kit.drift.measurements import (
    LayerEntry,
    Layers,
    Measurements,
    ProfileMeasurements,
    SampleColumns,
    SearchEntry,
    SliceEntry,
    downsample,
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


def test_old_measurements_without_input_ranges_are_read_and_written_unchanged() -> None:
    old = _measured().model_copy(update={"inputs": {}})
    assert b'"inputs"' not in old.dumps()
    assert Measurements.loads(old.dumps(), "m") == old
    assert _measured().within_size_limit().inputs == _measured().inputs


def test_measurements_without_slices_have_no_such_key() -> None:
    """Older versions, which read artifacts that have no slices, do not know it."""
    measured = _measured()
    profile = measured.profiles["cpu"].model_copy(update={"slices": {}})
    old = measured.model_copy(update={"profiles": {"cpu": profile}})
    assert b'"slices"' in measured.dumps()
    assert b'"slices"' not in old.dumps()
    assert Measurements.loads(old.dumps(), "m") == old


def test_an_output_that_is_not_logits_has_no_top1_columns() -> None:
    columns = SampleColumns.of([replace(DRIFT, top1_matches=0, top1_rows=0)], 10)
    assert columns.top1_rows == []
    assert SampleColumns.of([DRIFT], 10).top1_rows == [4]


def test_thousands_of_samples_are_thinned_evenly_and_their_count_is_kept() -> None:
    found = sample_columns({p: {o: _drifts(9_000) for o in "ab"} for p in ("cpu", "cuda")})
    rows = found["cpu"]["a"]
    assert rows.measured == 9_000
    assert len(rows.relative_l2) == measurements.MOST_SAMPLES // 4
    assert rows.relative_l2 == [(i * 9_000 // 2_500) / 1000 for i in range(2_500)]
    Measurements(profiles={p: ProfileMeasurements(outputs=outputs) for p, outputs in found.items()})


def test_few_rows_are_not_thinned() -> None:
    assert list(downsample("abc", 10)) == ["a", "b", "c"]
    assert list(downsample("", 10)) == []


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


def test_room_is_the_number_of_binades_to_the_nearer_end() -> None:
    found = ranges({"w": Census(count=2, max_abs=2.0**120, min_abs_nonzero=2.0**-120), "zeros": Census(count=2)})
    assert found.tensors["w"].headroom == pytest.approx(6.0)
    assert math.isinf(found.tensors["zeros"].headroom)


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
        (_edit(lambda m: m["ranges"]["tensors"]["w"].update(count=-1)), "count"),
    ],
    ids=lambda value: value if isinstance(value, str) else "data",
)
def test_an_invalid_file_is_rejected_and_named(data: bytes, said: str) -> None:
    with pytest.raises(ArtifactError, match=r"/a/measurements\.json") as raised:
        Measurements.loads(data, "/a/measurements.json")
    assert said in str(raised.value)


def test_a_file_larger_than_the_limit_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "MAX_BYTES", 1 << 20)
    with pytest.raises(ArtifactError, match="larger than 1 MiB"):
        Measurements.loads(b" " * ((1 << 20) + 1), "m")


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


def test_very_long_names_cost_rows_but_not_the_whole_file(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "x" * 10_000
    measured = _measured().model_copy(update={"ranges": ranges({name: Census(count=1)})})
    assert measured.within_size_limit() is measured
    monkeypatch.setattr(measurements, "MAX_BYTES", 8_000)
    within_size_limit = measured.within_size_limit()
    assert Measurements.loads(within_size_limit.dumps(), "m") == within_size_limit
    assert (
        within_size_limit.ranges.measured,
        within_size_limit.ranges.tensors,
        within_size_limit.profiles["cpu"].layers,
    ) == (1, {}, None)
    assert within_size_limit.profiles["cpu"].outputs == measured.profiles["cpu"].outputs
