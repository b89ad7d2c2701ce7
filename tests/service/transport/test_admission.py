"""Admission of calls: limits by number, by bytes, and by each client's share."""

from __future__ import annotations

import threading
import time

import pytest

from bf16kit.errors import Overloaded, Unavailable
from service.transport.admission import ByteBudget, Door, FairShares, Held, Shares


class TestShares:
    def test_a_single_holder_gets_none_of_the_last_eighth_of_the_places(self) -> None:
        shares = Shares(64)
        assert [shares.take("flood") for _ in range(64)] == [True] * 56 + [False] * 8

    def test_any_holder_may_take_places_while_half_are_free(self) -> None:
        shares = Shares(16)
        for holder in "abc":
            assert shares.take(holder)
        assert all(shares.take("d") for _ in range(5))

    def test_each_holder_gets_an_equal_part_when_places_are_few(self) -> None:
        shares = Shares(64)
        while shares.take("flood"):
            pass
        assert shares.take("other")
        assert shares.take("other")
        assert not shares.take("other")  # the reserved eighth is for holders of at most two of the 64 places
        for _ in range(10):
            shares.give("flood")
        assert not shares.take("flood")  # "flood" holds 46, and its part is 32 now
        assert shares.take("other")

    def test_a_few_flooding_holders_leave_room_for_others(self) -> None:
        shares = Shares(64)
        for _ in range(100):
            for flood in "abcd":
                shares.take(flood)
        assert shares.take("honest")

    def test_the_limit_holds_for_newcomers_too(self) -> None:
        shares = Shares(4)
        assert [shares.take(holder) for holder in "abcde"] == [True] * 4 + [False]
        shares.give("a")
        assert shares.take("e")


class TestDoor:
    def test_a_call_over_the_limit_is_rejected_with_the_limit(self) -> None:
        door = Door(2, "requests in flight")
        places = [door.enter("a"), door.enter("b")]
        with pytest.raises(Overloaded, match="2 requests in flight is the limit of this server; try") as refused:
            door.enter("c")
        assert refused.value.reason == "in_flight"
        places[0].leave()
        door.enter("c")

    def test_a_place_is_given_back_once(self) -> None:
        door = Door(1, "calls")
        place = door.enter("a")
        place.leave()
        place.leave()
        door.enter("a")
        with pytest.raises(Overloaded):
            door.enter("b")

    def test_a_client_over_its_share_is_rejected_with_that_reason(self) -> None:
        door = Door(8, "calls")
        for _ in range(7):
            door.enter("flood")
        with pytest.raises(Overloaded, match=r"8 calls is the limit .* this connection has its share") as refused:
            door.enter("flood")
        assert refused.value.reason == "connection_share"
        door.enter("other")

    def test_a_closed_door_rejects_every_call_with_its_error(self) -> None:
        door = Door(8, "calls")
        door.close(lambda: Unavailable("going away"))
        with pytest.raises(Unavailable, match="going away"):
            door.enter("a")

    def test_wait_empty_waits_until_the_last_call_leaves(self) -> None:
        door = Door(8, "calls")
        assert door.wait_empty(time.monotonic() - 1)
        place = door.enter("a")
        assert not door.wait_empty(time.monotonic() + 0.01)
        threading.Timer(0.02, place.leave).start()
        assert door.wait_empty(time.monotonic() + 30)

    def test_a_door_is_crowded_when_half_of_its_places_are_taken(self) -> None:
        door = Door(4, "calls")
        door.enter("a")
        assert not door.crowded
        door.enter("a")
        assert door.crowded


def test_many_requests_for_one_model_leave_room_for_another() -> None:
    shares = FairShares(8, "model", "model_share")
    for _ in range(7):
        shares.take("busy")
    with pytest.raises(Overloaded, match="model 'busy' has its share of the 8 requests in flight") as refused:
        shares.take("busy")
    assert refused.value.reason == "model_share"
    shares.take("other")
    shares.give("busy")


class TestBytes:
    """The bytes of requests and responses are limited across all doors."""

    @pytest.fixture
    def budget(self) -> ByteBudget:
        return ByteBudget(100)

    @pytest.fixture
    def door(self, budget: ByteBudget) -> Door:
        return Door(10, "calls", budget=budget)

    def test_bytes_are_limited_except_for_a_single_call(self, door: Door) -> None:
        first, second = door.enter("a"), door.enter("a")
        Held(first).hold(150)
        with pytest.raises(Overloaded, match="requests and responses hold 150 bytes, the limit is 100") as refused:
            Held(second).hold(1)
        assert refused.value.reason == "bytes"
        first.leave()
        Held(second).hold(100)

    def test_two_doors_share_one_budget(self, door: Door, budget: ByteBudget) -> None:
        other = Door(10, "streams", budget=budget)
        Held(door.enter("a")).hold(60)
        assert other.crowded
        with pytest.raises(Overloaded, match="hold 60 bytes"):
            Held(other.enter("a")).hold(41)

    def test_a_call_that_left_gives_its_bytes_back_once_and_holds_no_more(self, door: Door) -> None:
        place = door.enter("a")
        held = Held(place)
        held.hold(60)
        place.leave()
        place.leave()
        held.hold(70)
        held.hold_more(90)
        held.release()
        Held(door.enter("a")).hold(100)
        with pytest.raises(Overloaded, match="hold 100 bytes"):
            Held(door.enter("a")).hold(1)

    def test_the_largest_of_several_sizes_of_one_request_counts(self, door: Door) -> None:
        held, other = Held(door.enter("a")), Held(door.enter("a"))
        for nbytes in (10, 60, 30):
            held.hold(nbytes)
        other.hold(40)
        with pytest.raises(Overloaded, match="hold 100 bytes"):
            Held(door.enter("a")).hold(1)

    def test_a_response_counts_in_addition_to_its_request(self, door: Door) -> None:
        held, other = Held(door.enter("a")), Held(door.enter("a"))
        held.hold(10)
        held.hold_more(150)  # allowed, because no other call holds bytes
        crowded = [door.crowded]
        with pytest.raises(Overloaded, match="hold 160 bytes"):
            other.hold_more(1)
        held.release()
        crowded.append(door.crowded)
        assert crowded == [True, False]
        other.hold_more(100)

    def test_each_request_of_a_stream_counts_until_it_is_released(self, door: Door) -> None:
        stream = door.enter("a")
        first, second, other = Held(stream), Held(stream), Held(door.enter("b"))
        first.hold(30)
        second.hold(30)
        second.hold_more(20)
        assert stream.nbytes == 80
        with pytest.raises(Overloaded, match="hold 80 bytes"):
            other.hold(21)
        first.release()
        first.release()
        assert stream.nbytes == 50
        other.hold(50)
        with pytest.raises(Overloaded, match="hold 100 bytes"):
            second.hold_more(1)
        stream.leave()
        other.hold_more(50)
