from __future__ import annotations

import pytest

from service.batching.pace import Pace


def test_the_expected_time_is_zero_before_the_first_run() -> None:
    assert Pace().seconds("any", 4) == 0.0


def test_rows_of_a_shape_are_expected_to_take_as_long_as_before() -> None:
    pace = Pace()
    pace.observe("short", 8, 0.4)
    assert pace.seconds("short", 2) == pytest.approx(0.1)


def test_an_unknown_shape_is_expected_to_take_as_long_as_the_others() -> None:
    pace = Pace()
    pace.observe("short", 1, 0.1)
    assert pace.seconds("unseen", 3) == pytest.approx(0.3)


def test_the_newest_batches_count_most() -> None:
    pace = Pace()
    pace.observe("x", 1, 1.0)
    for _ in range(40):
        pace.observe("x", 1, 0.01)
    assert pace.seconds("x", 1) == pytest.approx(0.01, rel=0.05)


def test_a_batch_without_rows_does_not_divide_by_zero() -> None:
    pace = Pace()
    pace.observe("x", 0, 0.5)
    assert pace.seconds("x", 0) == 0.5


def test_the_shapes_not_run_for_the_longest_time_are_forgotten_first() -> None:
    pace = Pace()
    for shape in range(1000):
        pace.observe(shape, 1, 1.0)
        pace.observe("always", 1, 5.0)
    assert pace.seconds("always", 1) == 5.0
    assert len(pace._by_shape) == 256
