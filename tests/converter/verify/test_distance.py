"""The distance between outputs that should differ only by fp32 noise."""

from __future__ import annotations

import math

import numpy as np
import pytest

from converter.verify.fp32noise import INCOMPARABLE, SAME, ULPS, measure_distance, perturb

X = np.random.default_rng(0).standard_normal((4, 100)).astype(np.float32)


def test_the_difference_is_relative_to_the_larger_norm() -> None:
    found = measure_distance(X, 2 * X)
    assert found.relative_l2 == pytest.approx(0.5)
    assert found.max_abs == pytest.approx(float(np.abs(X).max()))
    assert measure_distance(np.zeros(3), np.array([0, 1e-9, 0])).relative_l2 == 1
    assert measure_distance(X, X.copy()) == SAME
    assert measure_distance(X.astype(np.float16), X).relative_l2 < 1e-3
    assert measure_distance(X, X[:2]) == INCOMPARABLE
    words = np.array([b"a", b"b"], object)
    assert [measure_distance(words, other) for other in (words.copy(), words[::-1])] == [SAME, INCOMPARABLE]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_must_be_the_same_in_both_outputs(value: float) -> None:
    other = X.copy()
    other[1, 2] = value
    assert measure_distance(X, other) == INCOMPARABLE
    assert measure_distance(other, X) == INCOMPARABLE
    assert measure_distance(other, other.copy()) == SAME


def test_masked_logits_do_not_hide_differences_of_the_others() -> None:
    masked = np.where(np.arange(100) % 2, X, np.float32(-1e9))
    wrong = np.where(np.arange(100) % 2, X * np.float32(1.01), np.float32(-1e9))
    assert measure_distance(masked, wrong).relative_l2 == pytest.approx(0.01, rel=0.02)
    clamped = np.where(masked < -1e8, np.float32(-3.3895314e38), masked)
    lowest = np.where(masked < -1e8, np.float32(-3.4028235e38), masked)
    assert measure_distance(lowest, clamped) == SAME


def test_perturbing_moves_values_by_ulps_and_leaves_extreme_values_unchanged() -> None:
    edges = np.array([0, -0.0, 1e-45, np.finfo(np.float32).max, np.inf, np.nan], np.float32)
    values = np.concatenate([X.reshape(-1), edges])
    moved = perturb(values, np.random.default_rng(1))
    distance = np.abs(moved.view(np.int32).astype(np.int64) - values.view(np.int32))
    assert distance[:400].max() == ULPS
    assert distance[400:].max() == 0
    assert (moved[:400] != values[:400]).mean() > 0.9
    coarse = perturb(X, np.random.default_rng(1), 2.0**-11)
    assert 1e-3 < np.abs(coarse / X - 1).max() < 2e-2
    integers = np.arange(3)
    assert perturb(integers, np.random.default_rng(1)) is integers
