"""Recent drift: each bound with its interval, and slices; what one request may add to them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from bf16kit.drift.metrics import Budget, SampleDrift
from bf16kit.drift.slices import Variation
from bf16kit.numerics.tensors import TensorSpec
from service.drift.estimates import Estimate, estimates, slice_estimate
from service.drift.recent import HALF_LIFE, MIN_EFFECTIVE_SIZE, PER_REQUEST, REQUESTS, LiveSlices, RecentRows


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


def test_fewer_than_the_least_samples_have_an_estimate_and_no_interval() -> None:
    few = judged(
        [row()] * int(MIN_EFFECTIVE_SIZE - 1), relative_l2=1e-2, sqnr_db=40, top1_agreement=0.9, relative_l2__p50=1e-2
    )
    for bound in ("relative_l2", "sqnr_db", "relative_l2.p50"):
        assert few[bound].ratio == pytest.approx(0.1)
        assert (few[bound].low, few[bound].high) == (0.0, math.inf)
    assert "top1_agreement" not in few


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
        ([row(max_abs=0.1), row(max_abs=3.0), row()], {"max_abs": 1.0}, 3.0),
        ([row(), row(bad=2), row()], {"nonfinite": 1.0}, 2.0),
        ([row(2e-3), row()], {"relative_l2__worst": 1e-3}, 2.0),
        ([*[row()] * 20, row(math.inf)], {"relative_l2": 1e-2}, math.inf),
        ([*[row()] * 20, row(sqnr_db=-math.inf)], {"sqnr_db": 40}, math.inf),
        ([row(0.0)] * 20, {"relative_l2": 0.0}, 0.0),
        ([row(1e-9)] * 20, {"relative_l2": 0.0}, math.inf),
    ],
    ids=["largest", "not finite", "worst", "infinite mean", "infinite decibels", "0 of 0", "a little of 0"],
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


def test_agreement_counts_the_converters_ties_by_weight_and_effective_samples() -> None:
    recent = RecentRows()
    for index in range(100):
        recent.add([row(top1=(index % 2, 1))], 1.0 if index % 2 else 9.0)
    (found,) = estimates(recent.window(), Budget.from_dict({"top1_agreement": 0.5}))
    assert found.ratio == pytest.approx(0.9 / 0.5, rel=0.01)
    assert recent.window().size == pytest.approx(1000**2 / (100 * 82) * 0.5, rel=0.2)


@pytest.mark.parametrize("rows", [1, PER_REQUEST, PER_REQUEST + 1, 128])
def test_each_request_counts_as_one_sample_whatever_its_size(rows: int) -> None:
    recent = RecentRows()
    for _ in range(REQUESTS + 10):
        recent.add([row()] * rows, 1.0)
    window = recent.window()
    assert window.size == pytest.approx(1090, abs=1)
    assert len(window.weights) == REQUESTS * min(rows, PER_REQUEST)
    assert window.weights[-min(rows, PER_REQUEST) :].sum() == pytest.approx(rows)


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


@pytest.mark.long
def test_the_window_holds_the_newest_requests_in_order_after_they_were_moved_to_the_front() -> None:
    """Compare the window with a plain list of the same rows."""
    random = np.random.default_rng(5)
    recent, kept, since = RecentRows(), list[tuple[int, float, float, str]](), 0
    for request in range(1, 5 * REQUESTS):
        rows = int(random.integers(1, PER_REQUEST + 1))
        weight, client = float(random.uniform(0.5, 2)), "abc"[random.integers(0, 3)]
        drifts = [row(float(value)) for value in random.lognormal(-6, 0.3, rows)]
        recent.add(drifts, weight, client)
        kept += [(request, drift.relative_l2, weight, client) for drift in drifts]
        if request % 1500 == 700:
            recent.keep_newest(request % 7)
            since = request - request % 7 + 1
        if request % 397 and request % 1500 not in (700, 701):
            continue
        oldest = max(since, request - REQUESTS + 1)
        expected = [each for each in kept if each[0] >= oldest]
        window = recent.window()
        numbers, drift, weights, clients = zip(*expected, strict=True) if expected else ((), (), (), ())
        np.testing.assert_array_equal(window["relative_l2"], drift)
        np.testing.assert_array_equal(window.clients, [hash(each) for each in clients])
        faded = np.array(weights) * np.exp2((np.array(numbers) - request) / HALF_LIFE)
        np.testing.assert_array_equal(window.weights, faded)
        totals = [faded[np.array(numbers) == number].sum() for number in sorted(set(numbers))]
        size = sum(totals) ** 2 / sum(total**2 for total in totals) if totals else 0.0
        assert window.size == pytest.approx(size, rel=1e-12)


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


@pytest.mark.parametrize("outlier", [1e4, 1e30, 1e200])
def test_one_huge_request_does_not_hide_a_destroyed_slice(outlier: float) -> None:
    live = LiveSlices(SPEC, 0, known())
    for seed in range(300):
        reference = outputs(seed) * (outlier if seed == 20 else 1)
        candidate = reference.copy()
        candidate[:, 2] = outputs(seed + 1000)[:, 2]
        send(live, reference, candidate)
    worst = live.worst()
    assert worst is not None
    assert worst.index == 2
    assert worst.error > 1


@pytest.mark.parametrize("after", [16, 40, 300])
def test_one_request_does_not_raise_the_alarm(after: int) -> None:
    live = LiveSlices(SPEC, 0, known())
    for seed in range(after):
        reference = outputs(seed)
        send(live, reference, reference + (1e3 if seed == 3 else 0))
    worst = live.worst()
    assert worst is not None
    assert slice_estimate(worst.error / 0.5, after).low < 1


def test_a_slice_that_the_conversion_did_not_judge_is_not_judged() -> None:
    scales = known()
    scales[0][2] = np.inf
    live = LiveSlices(SPEC, 0, scales)
    for seed in range(100):
        reference = outputs(seed)
        candidate = reference.copy()
        candidate[:, 2] = 5
        send(live, reference, candidate)
    worst = live.worst()
    assert worst is not None
    assert worst.error == 0
    assert (worst.judged, worst.slices) == (5, 6)


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
    worst = live.worst()
    assert worst is not None
    assert worst.error == pytest.approx(0.1, rel=0.3)
    assert worst.judged == 5
