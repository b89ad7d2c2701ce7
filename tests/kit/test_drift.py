"""Drift as the design defines it, against a plain float64 reference, and in edge cases."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from bf16kit.drift.budget import Budget
from bf16kit.drift.metrics import DriftSummary, SampleDrift, compare
from bf16kit.numerics.rounding import to_bf16
from bf16kit.numerics.tensors import TensorSpec

LOGITS = TensorSpec("y", "float32", ("batch", 8), "logits")
EMBEDDING = TensorSpec("y", "float32", ("batch", 8), "embedding")
INF, NAN = math.inf, math.nan


def measure(r: NDArray[Any], c: NDArray[Any], spec: TensorSpec, batch_axis: int | None) -> list[SampleDrift]:
    return compare(r, c, spec, batch_axis).rows


def one(reference: list[float], candidate: list[float], spec: TensorSpec = EMBEDDING) -> SampleDrift:
    (drift,) = measure(np.array(reference, np.float32), np.array(candidate, np.float32), spec, None)
    return drift


def noisy(shape: tuple[int, ...], noise: float, seed: int = 0) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    r = rng.standard_normal(shape)
    return r.astype(np.float32), (r + noise * rng.standard_normal(shape)).astype(np.float32)


class TestDefinitions:
    @pytest.mark.parametrize("noise", [1e-4, 1e-2, 1.0])
    def test_each_sample_follows_the_formulas(self, noise: float) -> None:
        r, c = noisy((5, 8), noise)
        for drift, r_row, c_row in zip(measure(r, c, LOGITS, 0), r.astype(float), c.astype(float), strict=True):
            error, length = np.linalg.norm(c_row - r_row), np.linalg.norm(r_row)
            cosine = 1 - c_row @ r_row / (np.linalg.norm(c_row) * length)
            assert drift.relative_l2 == pytest.approx(error / length, rel=1e-12)
            assert drift.cosine_distance == pytest.approx(cosine, rel=1e-6, abs=1e-15)
            assert drift.max_abs == np.abs(c_row - r_row).max()
            assert drift.sqnr_db == pytest.approx(20 * math.log10(length / error), rel=1e-12)
            assert (drift.top1_matches, drift.top1_rows) == (int(r_row.argmax() == c_row.argmax()), 1)
            assert drift.nonfinite == 0

    def test_cosine_distance_keeps_its_digits_when_vectors_nearly_agree(self) -> None:
        """1 − cos of an angle of 1e-9 is 5e-19; the textbook formula gives 0 or 1e-16."""
        r, c = np.array([1.0, 0.0]), np.array([1.0, 1e-9])
        (drift,) = measure(r, c, EMBEDDING, None)
        assert drift.cosine_distance == pytest.approx(5e-19, rel=1e-6)

    def test_rounding_gaussian_values_costs_what_theory_says(self) -> None:
        r = np.random.default_rng(0).standard_normal((1, 100_000)).astype(np.float32)
        (drift,) = measure(r, to_bf16(r), EMBEDDING, 0)
        assert drift.relative_l2 == pytest.approx(1.65e-3, rel=0.05)

    def test_samples_are_split_along_the_batch_axis(self) -> None:
        r, c = noisy((3, 4, 5), 0.1)
        along_second = measure(r, c, EMBEDDING, 1)
        assert len(along_second) == 4
        assert along_second[2] == measure(r[:, 2], c[:, 2], EMBEDDING, None)[0]

    @pytest.mark.parametrize(("shape", "axis"), [((3, 4), None), ((), 0), ((5,), 1)])
    def test_without_a_batch_axis_the_whole_output_is_one_sample(
        self, shape: tuple[int, ...], axis: int | None
    ) -> None:
        assert len(measure(*noisy(shape, 0.1), EMBEDDING, axis)) == 1
        assert measure(np.zeros((0, 8)), np.zeros((0, 8)), LOGITS, 0) == []

    def test_samples_larger_than_a_block_are_measured_like_small_ones(self) -> None:
        r, c = noisy((3, 700_000), 0.01)
        found = [d.max_abs for d in measure(r, c, EMBEDDING, 0)]
        assert found == np.abs(c.astype(float) - r).max(axis=1).tolist()

    def test_top1_counts_every_row_of_the_last_axis(self) -> None:
        r = np.eye(4, dtype=np.float32).reshape(1, 4, 4).repeat(2, axis=0)
        c = r.copy()
        c[1, 0] = [0, 2, 0, 0]
        first, second = measure(r, c, LOGITS, 0)
        assert (first.top1_matches, first.top1_rows) == (4, 4)
        assert (second.top1_matches, second.top1_rows) == (3, 4)

    @pytest.mark.parametrize(
        ("reference", "candidate", "matches"),
        [
            ([1.0, 1.0, 0.0], [1.0, 1.1, 0.0], 1),  # equal
            ([1.0, 1.0 - 2**-19, 0.0], [1.0, 1.1, 0.0], 1),  # the difference could come from another order of fp32 sums
            ([1.0, 1.0 - 2**-16, 0.0], [1.0, 1.1, 0.0], 0),  # the difference is too large for that
            ([0.0, -1e-9, -5.0], [0.0, 1e-3, -5.0], 0),  # small values are not tied
            ([-np.inf, -np.inf, -np.inf], [-1.0, 0.0, 0.0], 1),
            ([1.0, -np.inf, 0.0], [0.0, 1.0, 0.0], 0),
            ([np.inf, np.inf, 0.0], [0.0, np.inf, 0.0], 1),
        ],
    )
    def test_a_tie_in_the_reference_does_not_count_as_a_flip(
        self, reference: list[float], candidate: list[float], matches: int
    ) -> None:
        assert one(reference, candidate, LOGITS).top1_matches == matches

    def test_integers_and_booleans_are_compared_as_numbers_and_strings_are_either_equal_or_different(self) -> None:
        (drift,) = measure(np.array([3, 4]), np.array([3, 5]), EMBEDDING, None)
        assert (drift.relative_l2, drift.top1_rows) == (0.2, 0)
        (drift,) = measure(np.array([True, True]), np.array([True, False]), EMBEDDING, None)
        assert drift.max_abs == 1
        r, c = np.array([b"cat", b"dog"], object), np.array([b"cat", b"cow"], object)
        assert [d.relative_l2 for d in measure(r, c, EMBEDDING, 0)] == [0, 1]


class TestEdges:
    @pytest.mark.parametrize(
        ("reference", "candidate", "expected"),
        [
            ([0, 0], [0, -0.0], (0, 0, 0, INF, 0, 0, 0)),
            ([1, 2], [1, 2], (0, 0, 0, INF, 0, 0, 0)),
            ([0, 0], [0, 2], (INF, 1, 2, -INF, 0, 0, 0)),
            ([0, 2], [0, 0], (1, 1, 2, 0, 0, 0, 0)),
            ([1, 2], [1, NAN], (INF, 1, INF, -INF, 0, 0, 1)),
            ([1, 2], [1, INF], (INF, 1, INF, -INF, 0, 0, 1)),
            ([1, 2], [1, -INF], (INF, 1, INF, -INF, 0, 0, 1)),
            ([1, -INF, INF, NAN], [1, -INF, INF, NAN], (0, 0, 0, INF, 0, 0, 0)),
            # a lost mask: the reference hides an element, the candidate shows it
            ([1, -INF], [1, 100.0], (INF, 1, INF, -INF, 0, 0, 1)),
            ([1, -INF], [1, -3.39e38], (INF, 1, INF, -INF, 0, 0, 1)),
            ([1, -INF], [1, INF], (INF, 1, INF, -INF, 0, 0, 1)),
            ([1, -INF], [1, NAN], (INF, 1, INF, -INF, 0, 0, 1)),
        ],
    )
    def test_zeros_infinities_and_nan(
        self, reference: list[float], candidate: list[float], expected: tuple[float, ...]
    ) -> None:
        found = one(reference, candidate)
        assert found == SampleDrift(*expected)  # type: ignore[arg-type]
        signs = [math.copysign(1, value) for value in (found.relative_l2, found.cosine_distance, found.max_abs)]
        assert signs == [1] * 3  # a table would show minus zero as -0

    def test_one_bad_sample_does_not_affect_the_others_and_another_shape_is_infinitely_far_in_all(self) -> None:
        """Outputs whose shape depends on the data may differ in shape."""
        r, c = np.ones((2, 3), np.float32), np.ones((2, 3), np.float32)
        c[0, 0] = np.nan
        assert [(d.nonfinite, d.relative_l2) for d in measure(r, c, EMBEDDING, 0)] == [(1, INF), (0, 0)]
        drifts = measure(r, np.ones((2, 4)), LOGITS, 0)
        assert [(d.relative_l2, d.max_abs) for d in drifts] == [(INF, INF)] * 2

    @pytest.mark.parametrize("size", [1e-300, 1e-45, 3e38, 1e300])
    def test_extreme_values_neither_overflow_nor_vanish(self, size: float) -> None:
        (drift,) = measure(np.array([3.0, 4.0]) * size, np.array([3.0, 4.5]) * size, EMBEDDING, None)
        assert drift.relative_l2 == pytest.approx(0.1)
        assert drift.cosine_distance == pytest.approx(1 - (9 + 18) / (5 * math.hypot(3, 4.5)))

    @given(
        arrays.arrays(np.float32, (2, 5), elements=st.floats(width=32)),
        arrays.arrays(np.float32, (2, 5), elements=st.floats(width=32)),
    )
    def test_no_value_is_ever_nan_or_out_of_range(self, r: NDArray[np.float32], c: NDArray[np.float32]) -> None:
        for drift in measure(r, c, LOGITS, 0):
            assert drift.relative_l2 >= 0
            assert 0 <= drift.cosine_distance <= 2 + 1e-9
            assert drift.max_abs >= 0
            assert not math.isnan(drift.sqnr_db)
            assert 0 <= drift.top1_matches <= drift.top1_rows


def sample(
    relative_l2: float = 0.0, *, sqnr_db: float = 50.0, matches: int = 0, rows: int = 0, bad: int = 0
) -> SampleDrift:
    return SampleDrift(relative_l2, 0.0, relative_l2, sqnr_db, matches, rows, bad)


class TestFills:
    @pytest.mark.parametrize("fill", [-1e4, 1e4, -1e9, -3.4028234663852886e38])
    @pytest.mark.parametrize("rounded", [False, True], ids=["equal", "rounded to bf16"])
    def test_a_fill_that_both_hold_hides_nothing(self, fill: float, rounded: bool) -> None:
        r, c = noisy((4, 100), 1.0)
        without = measure(r[:, 1:], c[:, 1:], EMBEDDING, 0)
        r[:, 0] = c[:, 0] = fill
        if rounded:
            c[:, 0] = max(float(to_bf16(r[0, :1])[0]), -3.3895313892515355e38)
        for found, expected in zip(measure(r, c, EMBEDDING, 0), without, strict=True):
            assert found.relative_l2 == pytest.approx(expected.relative_l2)
            assert found.relative_l2 > 0.5

    def test_a_fill_that_the_candidate_lacks_or_has_another_of_is_an_error(self) -> None:
        r, c = noisy((1, 100), 1e-3)
        r[:, 0] = -1e9
        assert measure(r, c, EMBEDDING, 0)[0].relative_l2 == pytest.approx(1)
        r[:, 0], c[:, 0] = 1e4, 1.01e4
        assert measure(r, c, EMBEDDING, 0)[0].max_abs == pytest.approx(100, rel=1e-3)

    def test_a_positive_fill_is_never_the_top_class(self) -> None:
        r = np.tile(np.arange(100, dtype=np.float32), (2, 1))
        c = r[:, ::-1].copy()
        r[:, 50] = c[:, 50] = 1e6
        assert [d.top1_matches for d in measure(r, c, TensorSpec("y", "float32", ("n", 100), "logits"), 0)] == [0, 0]


class TestScalars:
    def test_one_number_per_sample_has_no_relative_error_and_no_angle(self) -> None:
        r, c, spec = np.array([[0.0], [2.0]]), np.array([[1e-6], [2.0]]), TensorSpec("y", "float32", ("n", 1))
        stats = DriftSummary.joined([compare(r, c, spec, 0, [np.array([1.0])])]).stats
        assert stats.keys() == {"max_abs", "nonfinite", "slice_error"}
        assert stats["max_abs"]["worst"] == 1e-6

    def test_without_a_slice_to_judge_it_by_one_number_has_its_relative_error(self) -> None:
        """Else nothing would be judged at all."""
        r, c, spec = np.array([[2.0], [2.0]]), np.array([[3.0], [2.0]]), TensorSpec("y", "float32", ("n", 1))
        for scales in (None, [np.array([np.inf])]):
            assert DriftSummary.joined([compare(r, c, spec, 0, scales)]).judged("relative_l2") == 0.25
        labels = compare(np.array([[3], [4]]), np.array([[3], [5]]), TensorSpec("y", "int64", ("n", 1)), 0)
        assert DriftSummary.joined([labels]).judged("relative_l2") == 0.125

    @pytest.mark.parametrize(
        ("reference", "candidate", "rows"),
        [([0, 3, 7, 7], [1, 3, 7, 7], 4), ([[True, False]] * 2, [[True, True], [True, False]], 4)],
    )
    def test_labels_are_judged_by_their_agreement_alone(
        self, reference: list[Any], candidate: list[Any], rows: int
    ) -> None:
        """By numbers, class 0 that becomes class 1 would be infinitely far, and class 7 that becomes 8 close."""
        r, c = np.array(reference), np.array(candidate)
        stats = DriftSummary.joined([compare(r, c, TensorSpec("y", r.dtype.name, ("n",), "logits"), 0)]).stats
        assert stats.keys() == {"max_abs", "nonfinite", "top1_agreement"}
        assert stats["top1_agreement"] == {"mean": 0.75, "rows": rows}

    @pytest.mark.parametrize("usual", [False, True])
    def test_a_rare_label_that_is_lost_is_no_agreement(self, usual: bool) -> None:
        """Of 1,000 flags in a sample, equal ones of the usual kind count as one."""
        r = np.full((4, 1000), usual)
        r[:, ::200] = not usual
        stats = DriftSummary.joined(
            [compare(r, np.full_like(r, usual), TensorSpec("y", "bool", ("n", 1000), "logits"), 0)]
        )
        assert stats.judged("top1_agreement") == 1 / 6

    def test_labels_far_beyond_the_others_agree_with_themselves(self) -> None:
        """Such a number is a fill among others: two of them are no difference that is judged."""
        r = np.array([3, 5, 900_000, 4])
        stats = DriftSummary.joined([compare(r, r.copy(), TensorSpec("y", "int64", ("n",), "logits"), 0)])
        assert stats.judged("top1_agreement") == 1.0


class TestSummary:
    def test_distribution_of_a_hundred_samples(self) -> None:
        stats = DriftSummary.of(sample(i / 100, sqnr_db=i) for i in range(1, 101)).stats
        assert stats["relative_l2"] == {"mean": pytest.approx(0.505), "p50": 0.5, "p99": 0.99, "worst": 1.0}
        assert stats["sqnr_db"] == {"mean": 50.5, "p50": 51, "p99": 2, "worst": 1}

    def test_top1_is_over_all_rows_and_absent_without_any(self) -> None:
        summary = DriftSummary.of([sample(matches=1, rows=1), sample(matches=1, rows=3)])
        assert summary.stats["top1_agreement"] == {"mean": 0.5, "rows": 4}
        assert summary.judged("top1_agreement") == 0.5
        assert DriftSummary.of([sample()]).judged("top1_agreement") is None

    @pytest.mark.parametrize(("given", "expected", "rows"), [(100, 0.97, 100), (20, 1 - 3 / 120, 120)])
    def test_made_samples_count_in_agreement_only_where_the_given_are_too_few(
        self, given: int, expected: float, rows: int
    ) -> None:
        """Else samples that agree would make up for given ones that do not."""
        own, made = [sample(matches=given - 3, rows=given)], [sample(matches=100, rows=100)]
        stats = DriftSummary.of(own, made=made).stats["top1_agreement"]
        assert stats == {"mean": pytest.approx(expected), "rows": rows}

    def test_bad_samples_count_and_exact_ones_do_not_hide_them(self) -> None:
        summary = DriftSummary.of([sample(0.1, bad=2), sample(INF, sqnr_db=-INF, bad=3), sample(0.1, sqnr_db=INF)])
        assert [summary.judged(name) for name in ("relative_l2", "sqnr_db", "nonfinite")] == [INF, -INF, 5]
        assert DriftSummary.of([sample(sqnr_db=INF), sample(sqnr_db=20)]).judged("sqnr_db") == 20

    def test_the_default_bound_on_p99_admits_two_numbers_per_row_at_the_bound_on_the_mean(self) -> None:
        """They are the sound outputs of heaviest tail: if both numbers are near zero, their relative error explodes."""
        rng = np.random.default_rng(0)
        reference, noise = rng.standard_normal((2, 20_000, 2))
        spec = TensorSpec("y", "float32", ("batch", 2), "embedding")
        distances = [row.relative_l2 for row in measure(reference, reference + noise, spec, 0)]
        scale = 1.5e-2 / float(np.mean(distances))
        summary = DriftSummary.of(measure(reference, reference + scale * noise, spec, 0))
        assert 0.085 < (summary.judged("relative_l2.p99") or 0) < 0.1

    def test_a_p99_is_judged_from_a_hundred_samples_on(self) -> None:
        """Of fewer it is the worst, which a single odd row decides."""
        rows = [sample(0.01)] * 98 + [sample(0.2)]
        assert DriftSummary.of(rows).judged("relative_l2.p99") is None
        assert Budget().breaches("y", DriftSummary.of(rows)) == []
        (breach,) = Budget().breaches("y", DriftSummary.of([*rows, rows[-1]]))
        assert str(breach) == "output 'y': relative_l2.p99 is 0.2, the budget allows at most 0.1"
        assert DriftSummary.of(rows).judged("relative_l2.worst") == 0.2
        with pytest.raises(ValueError, match="no samples"):
            DriftSummary.of([])
