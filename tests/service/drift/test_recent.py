"""Recent drift: each bound with its interval, and slices; what one request may add to them."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from bf16kit.drift.metrics import Budget, SampleDrift
from bf16kit.drift.slices import SliceError, Variation
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.service.drift.estimates import Estimate, estimates, slice_estimate
from bf16kit.service.drift.recent import HALF_LIFE, PER_REQUEST, REQUESTS, LiveSlices, RecentRows


def row(
    relative_l2: float = 1e-3,
    *,
    sqnr_db: float = 60.0,
    max_abs: float = 0.1,
    top1: tuple[int, int] = (0, 0),
    bad: int = 0,
) -> SampleDrift:
    return SampleDrift(relative_l2, relative_l2**2 / 2, max_abs, sqnr_db, *top1, bad)


def judged(rows: list[SampleDrift], **bounds: float) -> dict[str, Estimate]:
    recent = RecentRows()
    for each in rows:
        recent.add([each], 1.0)
    budget = Budget.from_dict({name.replace("__", "."): bound for name, bound in bounds.items()})
    return {each.metric: each for each in estimates(recent.window(), budget)}


def test_floors_have_their_interval_the_right_way_round() -> None:
    rng = np.random.default_rng(0)
    rows = [
        row(sqnr_db=float(db), top1=(int(hit), 1))
        for db, hit in zip(rng.normal(46, 2, 300), rng.random(300) < 0.97, strict=True)
    ]
    found = judged(rows, sqnr_db=40, top1_agreement=0.9, sqnr_db__p99=40)
    for bound in found.values():
        assert bound.low < bound.ratio < bound.high
    assert found["sqnr_db"].ratio == pytest.approx(0.5, rel=0.05)
    assert found["top1_agreement"].ratio == pytest.approx(0.3, abs=0.15)
    assert found["sqnr_db.p99"].ratio > found["sqnr_db"].ratio


@pytest.mark.parametrize(
    ("rows", "bound", "ratio"),
    [
        ([row(), row(bad=2), row()], {"nonfinite": 1.0}, 2.0),
        ([*[row()] * 20, row(sqnr_db=-math.inf)], {"sqnr_db": 40}, math.inf),
        ([row(0.0)] * 20, {"relative_l2": 0.0}, 0.0),
        ([row(1e-9)] * 20, {"relative_l2": 0.0}, math.inf),
    ],
    ids=["not finite", "infinite decibels", "0 of 0", "a little of 0"],
)
def test_bounds_on_measured_rows_and_infinite_ratios_have_no_width(
    rows: list[SampleDrift], bound: dict[str, float], ratio: float
) -> None:
    (found,) = judged(rows, **bound).values()
    assert (found.ratio, found.low, found.high, found.lowest) == (ratio,) * 4


@pytest.mark.parametrize(
    ("inexact", "bounded"), [(0, True), (1, False), (5, False), (10, True)], ids=["exact", "one", "few", "half"]
)
def test_exact_rows_do_not_count_in_the_mean_of_the_decibels(inexact: int, bounded: bool) -> None:
    """Few inexact rows have an estimate and no interval."""
    found = judged([*[row(sqnr_db=40.0)] * inexact, *[row(0.0, sqnr_db=math.inf)] * (20 - inexact)], sqnr_db=40)
    assert found["sqnr_db"].ratio == pytest.approx(1 if inexact else 0)
    assert (found["sqnr_db"].high < math.inf) == bounded


@pytest.mark.parametrize(
    ("rows", "last"),
    [(1, REQUESTS + 9), (PER_REQUEST, 4 * REQUESTS + 9), (PER_REQUEST + 1, REQUESTS + 9)],  # the second moves the rows
)
def test_the_newest_requests_are_recent_each_as_one_sample_whatever_its_size(rows: int, last: int) -> None:
    recent = RecentRows()
    for number in range(1, last + 1):
        recent.add([row(float(number))] * rows, 2.0, str(number % 3))
    window, kept = recent.window(), min(rows, PER_REQUEST)
    newest = np.repeat(np.arange(last - REQUESTS + 1, last + 1), kept)
    np.testing.assert_array_equal(window["relative_l2"], newest)
    np.testing.assert_array_equal(window.clients, [hash(str(number % 3)) for number in newest])
    weights = window.weights.reshape(REQUESTS, kept).sum(1)
    np.testing.assert_allclose(weights, 2 * rows * np.exp2(-np.arange(REQUESTS)[::-1] / HALF_LIFE))
    assert window.size == pytest.approx(1090, abs=1)
    recent.keep_newest(3)
    np.testing.assert_array_equal(recent.window()["relative_l2"], newest[-3 * kept :])


def test_a_large_request_has_the_mean_of_all_its_rows_and_keeps_the_worst_rows() -> None:
    """This holds even if the rows are sorted, and however far the worst are from the others."""
    rng = np.random.default_rng(0)
    recent, all_rows = RecentRows(), list[SampleDrift]()
    for _ in range(400):
        sizes = np.sort(1e-3 * np.exp(0.3 * rng.standard_normal(100)))
        rows = [row(float(size), sqnr_db=float(-20 * np.log10(size)), max_abs=0.1) for size in sizes]
        rows[17] = row(float(sizes[17]), max_abs=0.7)
        recent.add(rows, 1.0)
        all_rows += rows
    bounds = Budget.from_dict({"relative_l2": 1.0, "max_abs": 1.0, "relative_l2.p50": 1.0, "relative_l2.worst": 1.0})
    found = {each.metric: each.ratio for each in estimates(recent.window(), bounds)}
    drifts = [each.relative_l2 for each in all_rows]
    assert found["relative_l2"] == pytest.approx(np.mean(drifts), rel=0.02)
    assert found["relative_l2.p50"] == pytest.approx(np.median(drifts), rel=0.05)
    assert (found["relative_l2.worst"], found["max_abs"]) == (max(drifts), 0.7)


def test_all_nonfinite_elements_of_a_large_request_are_counted_at_once() -> None:
    recent = RecentRows()
    rows = [row(math.inf, bad=3) if index in (41, 77) or index > 90 else row() for index in range(100)]
    recent.add(rows, 1.0)
    (found,) = estimates(recent.window(), Budget.from_dict({"nonfinite": 1}))
    assert (found.ratio, found.low) == (33.0, 33.0)


# --- slices -----------------------------------------------------------------------------------------------------------

SPEC = TensorSpec("y", "float32", ("n", 6))
Rows = NDArray[np.float64]


def outputs(seed: int, count: int = 1) -> Rows:
    return np.random.default_rng(seed).standard_normal((count, 6))


def known() -> list[Rows]:
    """What slices are judged against after a conversion."""
    variation = Variation(SPEC, 0)
    variation.add(outputs(0, 64))
    return variation.scales()


def send(live: LiveSlices, reference: Rows, candidate: Rows) -> None:
    live.add(live.compare(reference, candidate))


def worst_of(live: LiveSlices) -> SliceError:
    worst = live.worst()
    assert worst is not None
    return worst


@pytest.mark.parametrize("outlier", [1e4, 1e30, 1e200])
def test_one_huge_request_does_not_hide_a_destroyed_slice(outlier: float) -> None:
    live = LiveSlices(SPEC, 0, known())
    for seed in range(300):
        reference = outputs(seed) * (outlier if seed == 20 else 1)
        candidate = reference.copy()
        candidate[:, 2] = outputs(seed + 1000)[:, 2]
        send(live, reference, candidate)
    assert worst_of(live).index == 2
    assert worst_of(live).error > 1


@pytest.mark.parametrize("after", [16, 40, 300])
def test_one_request_does_not_raise_the_alarm(after: int) -> None:
    live = LiveSlices(SPEC, 0, known())
    for seed in range(after):
        reference = outputs(seed)
        send(live, reference, reference + (1e3 if seed == 3 else 0))
    assert slice_estimate(worst_of(live).error / 0.5, after).low < 1


def test_a_slice_that_the_conversion_did_not_judge_is_not_judged() -> None:
    scales = known()
    scales[0][2] = np.inf
    live = LiveSlices(SPEC, 0, scales)
    for seed in range(100):
        reference = outputs(seed)
        candidate = reference.copy()
        candidate[:, 2] = 5
        send(live, reference, candidate)
    worst = worst_of(live)
    assert (worst.error, worst.judged, worst.slices) == (0, 5, 6)


def test_a_request_without_an_element_of_a_slice_changes_nothing() -> None:
    """Its elements are infinite in both: masked."""
    scales = known()
    scales[0][2] = np.inf
    live = LiveSlices(SPEC, 0, scales)
    for seed in range(40):
        reference = outputs(seed)
        reference[:, 1:3] = -np.inf if seed == 20 else reference[:, 1:3]
        candidate = reference + 0.1
        send(live, reference, candidate)
    assert worst_of(live).error == pytest.approx(0.1, rel=0.3)
    assert worst_of(live).judged == 5
