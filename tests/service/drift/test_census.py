from __future__ import annotations

import numpy as np
import pytest

from bf16kit.drift.measurements import InputRange
from service.drift.census import RangeChecker

KNOWN = InputRange(low=-1.0, high=1.0)


def test_rows_out_of_range_are_reported_by_input() -> None:
    feeds = {
        "x": np.array([[0.0, 1.0], [0.0, 99.0], [np.nan, 0.0]], np.float32),
        "ids": np.array([[1], [2], [3]]),
        "text": np.array([["a"], ["b"], ["c"]], object),
    }
    found = RangeChecker({"x": KNOWN, "ids": InputRange(low=0.0, high=100.0)}, 0).outside(feeds, 3)
    assert {name: rows.tolist() for name, rows in found.items()} == {"x": [False, True, True], "ids": [False] * 3}


def test_rows_are_counted_along_the_batch_axis() -> None:
    feeds = {"x": np.array([[0.0, 99.0], [0.0, 0.0]])}
    assert RangeChecker({"x": KNOWN}, 1).outside(feeds, 2)["x"].tolist() == [False, True]


@pytest.mark.parametrize(("axis", "rows"), [(None, 1), (0, 4), (7, 2)])
def test_an_input_without_rows_counts_for_all_rows(axis: int | None, rows: int) -> None:
    feeds = {"x": np.array([[0.0, 99.0], [0.0, 0.0]])}
    assert RangeChecker({"x": KNOWN}, axis).outside(feeds, rows)["x"].tolist() == [True] * rows


def test_an_input_that_was_not_given_or_has_no_range_is_not_judged() -> None:
    assert RangeChecker({"x": KNOWN}, 0).outside({"other": np.ones((1, 1))}, 1) == {}
    assert RangeChecker({}, 0).outside({"x": np.ones((1, 1))}, 1) == {}
