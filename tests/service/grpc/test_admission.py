"""Admission of calls: limits by number, by bytes, and by each client's share."""

from __future__ import annotations

import threading
import time

import pytest

from bf16kit.messages.errors import Overloaded, Unavailable
from service.grpc.admission import Admission, ByteBudget, CallBytes, FairShares, Shares


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

    def test_a_few_flooding_holders_leave_room_for_others(self) -> None:
        shares = Shares(64)
        for _ in range(100):
            for flood in "abcd":
                shares.acquire(flood)
        assert shares.acquire("honest")

    def test_the_limit_holds_for_newcomers_too(self) -> None:
        shares = Shares(4)
        assert [shares.acquire(holder) for holder in "abcde"] == [True] * 4 + [False]
        shares.release("a")
        assert shares.acquire("e")


class TestDoor:
    def test_a_call_over_the_limit_is_rejected_with_the_limit(self) -> None:
        admission = Admission(2, "requests in flight")
        places = [admission.admit("a"), admission.admit("b")]
        with pytest.raises(Overloaded, match="2 requests in flight is the limit of this server; try") as refused:
            admission.admit("c")
        assert refused.value.reason == "in_flight"
        places[0].release()
        admission.admit("c")

    def test_a_place_is_given_back_once(self) -> None:
        admission = Admission(1, "calls")
        place = admission.admit("a")
        place.release()
        place.release()
        admission.admit("a")
        with pytest.raises(Overloaded):
            admission.admit("b")

    def test_a_client_over_its_share_is_rejected_with_that_reason(self) -> None:
        admission = Admission(8, "calls")
        for _ in range(7):
            admission.admit("flood")
        with pytest.raises(Overloaded, match=r"8 calls is the limit .* this connection has its share") as refused:
            admission.admit("flood")
        assert refused.value.reason == "connection_share"
        admission.admit("other")

    def test_a_closed_door_rejects_every_call_with_its_error(self) -> None:
        admission = Admission(8, "calls")
        admission.close(lambda: Unavailable("going away"))
        with pytest.raises(Unavailable, match="going away"):
            admission.admit("a")

    def test_wait_empty_waits_until_the_last_call_leaves(self) -> None:
        admission = Admission(8, "calls")
        assert admission.wait_empty(time.monotonic() - 1)
        place = admission.admit("a")
        assert not admission.wait_empty(time.monotonic() + 0.01)
        threading.Timer(0.02, place.release).start()
        assert admission.wait_empty(time.monotonic() + 30)

    def test_a_door_is_crowded_when_half_of_its_places_are_taken(self) -> None:
        admission = Admission(4, "calls")
        admission.admit("a")
        assert not admission.under_pressure
        admission.admit("a")
        assert admission.under_pressure


def test_many_requests_for_one_model_leave_room_for_another() -> None:
    shares = FairShares(8, "model", "model_share")
    for _ in range(7):
        shares.acquire("busy")
    with pytest.raises(Overloaded, match="model 'busy' has its share of the 8 requests in flight") as refused:
        shares.acquire("busy")
    assert refused.value.reason == "model_share"
    shares.acquire("other")
    shares.release("busy")


class TestBytes:
    """The bytes of requests and responses are limited across all doors."""

    @pytest.fixture
    def budget(self) -> ByteBudget:
        return ByteBudget(100)

    @pytest.fixture
    def admission(self, budget: ByteBudget) -> Admission:
        return Admission(10, "calls", budget=budget)

    def test_bytes_are_limited_except_for_a_single_call(self, admission: Admission) -> None:
        first, second = admission.admit("a"), admission.admit("a")
        CallBytes(first).reserve(150)
        with pytest.raises(Overloaded, match="requests and responses hold 150 bytes, the limit is 100") as refused:
            CallBytes(second).reserve(1)
        assert refused.value.reason == "bytes"
        first.release()
        CallBytes(second).reserve(100)

    def test_two_doors_share_one_budget(self, admission: Admission, budget: ByteBudget) -> None:
        other = Admission(10, "streams", budget=budget)
        CallBytes(admission.admit("a")).reserve(60)
        assert other.under_pressure
        with pytest.raises(Overloaded, match="hold 60 bytes"):
            CallBytes(other.admit("a")).reserve(41)

    def test_a_call_that_left_gives_its_bytes_back_once_and_holds_no_more(self, admission: Admission) -> None:
        place = admission.admit("a")
        held = CallBytes(place)
        held.reserve(60)
        place.release()
        place.release()
        held.reserve(70)
        held.reserve_more(90)
        held.release()
        CallBytes(admission.admit("a")).reserve(100)
        with pytest.raises(Overloaded, match="hold 100 bytes"):
            CallBytes(admission.admit("a")).reserve(1)

    def test_the_largest_of_several_sizes_of_one_request_counts(self, admission: Admission) -> None:
        held, other = CallBytes(admission.admit("a")), CallBytes(admission.admit("a"))
        for nbytes in (10, 60, 30):
            held.reserve(nbytes)
        other.reserve(40)
        with pytest.raises(Overloaded, match="hold 100 bytes"):
            CallBytes(admission.admit("a")).reserve(1)

    def test_a_response_counts_in_addition_to_its_request(self, admission: Admission) -> None:
        held, other = CallBytes(admission.admit("a")), CallBytes(admission.admit("a"))
        held.reserve(10)
        held.reserve_more(150)  # allowed, because no other call holds bytes
        crowded = [admission.under_pressure]
        with pytest.raises(Overloaded, match="hold 160 bytes"):
            other.reserve_more(1)
        held.release()
        crowded.append(admission.under_pressure)
        assert crowded == [True, False]
        other.reserve_more(100)

    def test_each_request_of_a_stream_counts_until_it_is_released(self, admission: Admission) -> None:
        stream = admission.admit("a")
        first, second, other = CallBytes(stream), CallBytes(stream), CallBytes(admission.admit("b"))
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
