"""Live slice errors: what one request may add, and what each slice is judged against."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from bf16kit.drift.slices import Variation
from bf16kit.numerics.tensors import TensorSpec
from service.drift.liveslices import LiveSlices, estimate

SPEC = TensorSpec("y", "float32", ("n", 6))
Rows = NDArray[np.float64]


def rows(seed: int, count: int = 1) -> Rows:
    return np.random.default_rng(seed).standard_normal((count, 6))


def known() -> list[Rows]:
    """What slices are judged against after a conversion."""
    variation = Variation(SPEC, 0)
    variation.add(rows(0, 64))
    return variation.scales()


def send(live: LiveSlices, reference: Rows, candidate: Rows) -> None:
    live.add(live.compare(reference, candidate))


def test_a_destroyed_slice_is_named() -> None:
    live = LiveSlices(SPEC, 0, known())
    for seed in range(200):
        reference = rows(seed)
        candidate = reference.copy()
        candidate[:, 2] = rows(seed + 1000)[:, 2]
        send(live, reference, candidate)
    worst = live.worst()
    assert worst is not None
    assert (worst.axis, worst.index) == (1, 2)
    assert worst.error == pytest.approx(1.4, rel=0.2)


@pytest.mark.parametrize("outlier", [1e4, 1e30, 1e200])
def test_one_huge_request_does_not_hide_a_destroyed_slice(outlier: float) -> None:
    live = LiveSlices(SPEC, 0, known())
    for seed in range(300):
        reference = rows(seed) * (outlier if seed == 20 else 1)
        candidate = reference.copy()
        candidate[:, 2] = rows(seed + 1000)[:, 2]
        send(live, reference, candidate)
    worst = live.worst()
    assert worst is not None
    assert worst.index == 2
    assert worst.error > 1


@pytest.mark.parametrize("after", [16, 40, 300])
def test_one_request_does_not_raise_the_alarm(after: int) -> None:
    live = LiveSlices(SPEC, 0, known())
    for seed in range(after):
        reference = rows(seed)
        send(live, reference, reference + (1e3 if seed == 3 else 0))
    worst = live.worst()
    assert worst is not None
    assert estimate(worst.error / 0.5, after).low < 1


def test_requests_that_repeat_one_input_are_judged_by_the_variation_at_conversion() -> None:
    live = LiveSlices(SPEC, 0, known())
    for _ in range(100):
        send(live, rows(7), rows(7) + 0.01)
    worst = live.worst()
    assert worst is not None
    assert worst.error < 0.05


def test_a_slice_that_the_conversion_did_not_judge_is_not_judged() -> None:
    scales = known()
    scales[0][2] = np.inf
    live = LiveSlices(SPEC, 0, scales)
    for seed in range(100):
        reference = rows(seed)
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
        reference = rows(seed)
        reference[:, 1:3] = -np.inf if seed == 20 else reference[:, 1:3]
        candidate = reference + 0.1
        send(live, reference, candidate)
    worst = live.worst()
    assert worst is not None
    assert worst.error == pytest.approx(0.1, rel=0.3)
    assert worst.judged == 5
