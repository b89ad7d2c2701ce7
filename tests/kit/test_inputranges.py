from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from bf16kit.drift.inputranges import InputRange, input_ranges


def test_the_range_covers_all_samples() -> None:
    feeds = [
        {"x": np.array([[1.0, -2.0]], np.float32), "ids": np.array([5, 900])},
        {"x": np.array([[7.0]], np.float32)},
    ]
    found = input_ranges(feeds)
    assert found == {"x": InputRange(low=-2.0, high=7.0), "ids": InputRange(low=5.0, high=900.0)}
    assert str(found["x"]) == "-2 to 7"


@pytest.mark.parametrize(
    "array",
    [np.array(["a"], object), np.array([True, False]), np.zeros((0, 3), np.float32)],
    ids=["strings", "booleans", "nothing"],
)
def test_strings_booleans_and_empty_arrays_have_no_range(array: np.ndarray) -> None:
    assert input_ranges([{"x": array}]) == {}


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


def test_bf16_inputs_have_a_range_too() -> None:
    array = np.array([1.5, -3.0], ml_dtypes.bfloat16)
    (found,) = input_ranges([{"x": array}]).values()
    assert (found.low, found.high) == (-3.0, 1.5)
    assert found.outside(np.array([1.0, 3e38], ml_dtypes.bfloat16)).tolist() == [False, True]
