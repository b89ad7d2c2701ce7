"""Which batches may begin beside those that run."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from service.batching.slots import ExecutionSlots
from service.request import Request


def request(width: int) -> Request:
    return Request({"x": np.zeros((1, width), np.float32)}, rows=1)


def width_of(asked: Request) -> Hashable:
    return int(asked.feeds["x"].shape[1])


def test_only_another_shape_fits_beside_a_batch() -> None:
    slots = ExecutionSlots(instances=1, beside=1)
    slots.batch_started(4, beside=False)
    assert not slots.idle
    assert not slots.fits(4, width_of)
    assert slots.fits(8, width_of)


def test_only_another_shape_fits_beside_a_request_that_its_caller_runs() -> None:
    slots = ExecutionSlots(instances=1, beside=1)
    slots.caller_started(request(4))
    assert not slots.fits(4, width_of)
    assert slots.fits(8, width_of)


def test_nothing_fits_beside_a_claim_whose_request_is_not_known_yet() -> None:
    slots = ExecutionSlots(instances=1, beside=1)
    slots.caller_started(None)
    assert not slots.fits(8, width_of)
    slots.caller_finished(request(4))  # the request that used the claim has ended
    slots.batch_started(4, beside=False)
    assert slots.fits(8, width_of)


def test_no_more_batches_fit_than_configured() -> None:
    slots = ExecutionSlots(instances=1, beside=1)
    slots.batch_started(4, beside=False)
    slots.batch_started(8, beside=True)
    assert not slots.fits(16, width_of)
    assert not ExecutionSlots(instances=1, beside=0).fits(16, width_of)


def test_a_run_that_ends_frees_a_slot_of_its_own_kind() -> None:
    """This holds whichever run ends first, and whether an executor or a caller ran it."""
    slots = ExecutionSlots(instances=1, beside=1)
    first, second = request(4), request(8)
    slots.caller_started(first)
    slots.caller_started(second)
    slots.caller_finished(first)
    assert slots.idle
    slots.batch_started(16, beside=False)
    slots.caller_finished(second)
    assert slots.fits(32, width_of)
    slots.batch_started(32, beside=True)
    slots.batch_ended(16, beside=False)
    assert slots.idle
    assert not slots.fits(64, width_of)
    slots.batch_ended(32, beside=True)
    assert slots.fits(64, width_of)


def test_a_shape_may_begin_again_when_its_batch_has_ended() -> None:
    slots = ExecutionSlots(instances=1, beside=1)
    slots.batch_started(4, beside=False)
    slots.batch_started(8, beside=True)
    slots.batch_ended(8, beside=True)
    assert slots.fits(8, width_of)
