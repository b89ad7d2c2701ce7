"""Admission of calls: limits by number, by bytes, and by each client's share."""

from __future__ import annotations

import threading
import time

import pytest

from bf16kit.messages.errors import Overloaded
from service.grpc.admission import ByteBudget, MessageBytes, Permit, Shares


class TestShares:
    def test_a_single_holder_gets_none_of_the_last_eighth_of_the_places(self) -> None:
        shares = Shares(64)
        assert [shares.acquire("flood") for _ in range(64)] == [True] * 56 + [False] * 8

    def test_any_holder_may_take_places_while_half_are_free(self) -> None:
        shares = Shares(16)
        for holder in "abc":
            assert shares.acquire(holder)
        assert all(shares.acquire("d") for _ in range(5))

    def test_each_holder_gets_an_equal_part_when_places_are_few(self) -> None:
        shares = Shares(64)
        while shares.acquire("flood"):
            pass
        assert shares.acquire("other")
        assert shares.acquire("other")
        assert not shares.acquire("other")  # the reserved eighth is for holders of at most two of the 64 places
        for _ in range(10):
            shares.release("flood")
        assert not shares.acquire("flood")  # "flood" holds 46, and its part is 32 now
        assert shares.acquire("other")

    def test_wait_empty_waits_until_the_last_one_leaves(self) -> None:
        shares = Shares(8)
        assert shares.wait_empty(time.monotonic() - 1)
        shares.acquire("a")
        assert not shares.wait_empty(time.monotonic() + 0.01)
        threading.Timer(0.02, shares.release, ["a"]).start()
        assert shares.wait_empty(time.monotonic() + 30)


class Calls:
    """Calls that share a budget of 100 bytes."""

    def __init__(self) -> None:
        self.shares, self.budget = Shares(64), ByteBudget(100)

    def permit(self) -> Permit:
        assert self.shares.acquire("a")
        return Permit(self.shares, self.budget, "a")

    def message(self) -> MessageBytes:
        return MessageBytes(self.permit())


@pytest.fixture
def calls() -> Calls:
    return Calls()


def test_bytes_are_limited_except_for_a_single_call(calls: Calls) -> None:
    first, second = calls.permit(), calls.message()
    MessageBytes(first).reserve(150)
    crowded = [calls.budget.half_full]
    with pytest.raises(Overloaded) as refused:
        second.reserve(1)
    assert refused.value.reason == "bytes"
    first.release()
    assert [*crowded, calls.budget.half_full] == [True, False]
    second.reserve(100)


def test_a_call_that_left_gives_its_place_and_bytes_back_once_and_holds_no_more(calls: Calls) -> None:
    permit = calls.permit()
    held = MessageBytes(permit)
    held.reserve(60)
    permit.release()
    permit.release()
    held.reserve(70)
    held.reserve_more(90)
    held.release()
    assert (calls.shares.in_use, calls.budget.in_use) == (0, 0)


def test_the_largest_of_several_sizes_of_one_request_counts_and_its_response_in_addition(calls: Calls) -> None:
    held = calls.message()
    for nbytes in (10, 60, 30):
        held.reserve(nbytes)
    assert calls.budget.in_use == 60
    held.reserve_more(150)  # allowed, because no other call holds bytes
    assert calls.budget.in_use == 210
    held.release()
    assert calls.budget.in_use == 0


def test_each_request_of_a_stream_counts_until_it_is_released(calls: Calls) -> None:
    stream = calls.permit()
    first, second, other = MessageBytes(stream), MessageBytes(stream), calls.message()
    first.reserve(30)
    second.reserve(30)
    second.reserve_more(20)
    assert stream.nbytes == 80
    with pytest.raises(Overloaded, match="hold 80 bytes"):
        other.reserve(21)
    first.release()
    first.release()
    assert stream.nbytes == 50
    other.reserve(50)
    with pytest.raises(Overloaded, match="hold 100 bytes"):
        second.reserve_more(1)
    stream.release()
    other.reserve_more(50)
