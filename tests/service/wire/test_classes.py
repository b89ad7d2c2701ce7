"""The classification extension: the largest values of each row, in Triton's format."""

from __future__ import annotations

import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from bf16kit.messages.errors import InvalidRequest
from service.wire.tensors import top_classes


def classes(array: Any, count: int, dtype: Any = np.float32, *, batched: bool = True) -> Any:
    return top_classes("y", np.asarray(array, dtype), count, batched=batched).tolist()


def test_each_row_has_its_largest_values_first_in_tritons_format() -> None:
    rows = [[0.25, 0.5, -1.0], [1e10, 0.0, 1 / 3]]
    assert classes(rows, 2) == [["0.500000:1", "0.250000:0"], ["10000000000.000000:0", "0.333333:2"]]
    assert classes([[1.0, 2.0]], 5) == [["2.000000:1", "1.000000:0"]], "there are no more"


def test_a_row_is_all_values_of_one_sample_and_without_a_batch_the_whole_output() -> None:
    assert classes(np.arange(8).reshape(2, 2, 2), 1) == [["3.000000:3"], ["7.000000:3"]]
    assert classes([[1, 4], [3, 2]], 3, np.int32, batched=False) == ["4:1", "3:2", "2:3"]
    assert classes(2.5, 1, batched=False) == ["2.500000:0"]
    assert classes(np.zeros((0, 3)), 2) == classes(np.zeros((0, 3)), 2, batched=False) == []
    assert classes(np.zeros((2, 0)), 2) == [[], []]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.uint64])
def test_integers_are_written_exactly_and_ordered_over_their_whole_range(dtype: Any) -> None:
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    assert classes(np.array([[least, most, 5]], dtype), 3, dtype) == [[f"{most}:1", "5:2", f"{least}:0"]]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_float_types_are_written_in_the_same_way(dtype: Any) -> None:
    assert classes([[0.5, 2.0]], 2, dtype) == [["2.000000:1", "0.500000:0"]]


def test_equal_values_keep_their_order_and_nan_comes_last() -> None:
    row = [[np.nan, 1.0, np.inf, 1.0, -np.inf]]
    assert classes(row, 5) == [["inf:2", "1.000000:1", "1.000000:3", "-inf:4", "nan:0"]]
    many = classes(np.tile([[0.0, 1.0]], 500), 1000)[0]
    assert [int(entry.partition(":")[2]) for entry in many] == [*range(1, 1000, 2), *range(0, 1000, 2)]


def test_a_class_has_its_label_if_there_is_one() -> None:
    answer = top_classes("y", np.array([[1.0, 3.0, 2.0]], np.float32), 3, batched=True, labels=["cat", "dog"])
    assert answer.tolist() == [["3.000000:1:dog", "2.000000:2", "1.000000:0:cat"]]


def test_more_strings_than_a_response_may_hold_are_rejected() -> None:
    assert np.shape(classes(np.zeros((2, 40_000)), 32_768)) == (2, 32_768)
    with pytest.raises(InvalidRequest):
        classes(np.zeros((2, 40_000)), 32_769)


def test_many_rows_take_the_memory_of_one() -> None:
    rows = np.zeros((64, 1 << 16), np.float32)
    tracemalloc.start()
    try:
        classes(rows, 1)
        assert tracemalloc.get_traced_memory()[1] < rows.nbytes / 4
    finally:
        tracemalloc.stop()
