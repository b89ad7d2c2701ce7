"""What is let in: by count, by bytes, and by who asks."""

from __future__ import annotations

import threading
import time

import pytest

from bf16kit.errors import Overloaded, Unavailable
from service.transport.admission import Door, FairShares, Shares


class TestShares:
    def test_one_holder_alone_gets_no_place_of_the_last_eighth(self) -> None:
        shares = Shares(64)
        assert [shares.take("flood") for _ in range(64)] == [True] * 56 + [False] * 8

    def test_half_of_the_places_go_to_whoever_comes(self) -> None:
        shares = Shares(16)
        for holder in "abc":
            assert shares.take(holder)
        assert all(shares.take("d") for _ in range(5))

    def test_when_places_are_few_each_holder_has_an_equal_part(self) -> None:
        shares = Shares(64)
        while shares.take("flood"):
            pass
        assert shares.take("other")
        assert shares.take("other")
        assert not shares.take("other")  # two are few of 64, and three are not
        for _ in range(10):
            shares.give("flood")
        assert not shares.take("flood")  # it holds 46, and its part is 32 now
        assert shares.take("other")

    def test_a_few_who_flood_leave_room_for_those_who_do_not(self) -> None:
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
    def test_one_more_than_the_limit_is_refused_and_says_the_limit(self) -> None:
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
        place.hold(10)
        place.leave()
        place.leave()
        door.enter("a").hold(1)
        with pytest.raises(Overloaded):
            door.enter("b")

    def test_bytes_are_bounded_but_for_a_request_alone(self) -> None:
        door = Door(10, "calls", max_bytes=100)
        first, second = door.enter("a"), door.enter("a")
        first.hold(150)
        with pytest.raises(Overloaded, match="requests and answers of 150 bytes are held, the limit is 100") as refused:
            second.hold(1)
        assert refused.value.reason == "bytes"
        first.leave()
        second.hold(100)

    def test_what_arrives_after_its_call_has_ended_is_not_counted(self) -> None:
        door = Door(2, "calls", max_bytes=100)
        place = door.enter("a")
        place.leave()
        place.hold(60)
        other = door.enter("a")
        other.hold(100)

    def test_the_largest_message_of_a_call_is_what_it_holds(self) -> None:
        door = Door(3, "calls", max_bytes=100)
        stream, other = door.enter("a"), door.enter("a")
        for nbytes in (10, 60, 30):
            stream.hold(nbytes)
        other.hold(40)
        with pytest.raises(Overloaded, match="requests and answers of 100 bytes are held"):
            door.enter("a").hold(1)

    def test_an_answer_counts_beside_its_request_until_its_call_ends(self) -> None:
        door = Door(3, "calls", max_bytes=100)
        first, second = door.enter("a"), door.enter("a")
        first.hold(10)
        first.hold_answer(150)  # alone, it may
        crowded = [door.crowded]
        with pytest.raises(Overloaded, match="requests and answers of 160 bytes"):
            second.hold_answer(1)
        first.leave()
        first.hold_answer(1000)
        crowded.append(door.crowded)
        assert crowded == [True, False]
        second.hold_answer(90)
        with pytest.raises(Overloaded):
            door.enter("a").hold_answer(11)

    def test_a_clients_share_is_refused_with_its_reason(self) -> None:
        door = Door(8, "calls")
        for _ in range(7):
            door.enter("flood")
        with pytest.raises(Overloaded, match=r"8 calls is the limit .* this connection has its share") as refused:
            door.enter("flood")
        assert refused.value.reason == "connection_share"
        door.enter("other")

    def test_closed_it_tells_everybody_why(self) -> None:
        door = Door(8, "calls")
        door.close(lambda: Unavailable("going away"))
        with pytest.raises(Unavailable, match="going away"):
            door.enter("a")

    def test_waiting_for_the_last_to_leave(self) -> None:
        door = Door(8, "calls")
        assert door.wait_empty(time.monotonic() - 1)
        place = door.enter("a")
        assert not door.wait_empty(time.monotonic() + 0.01)
        threading.Timer(0.02, place.leave).start()
        assert door.wait_empty(time.monotonic() + 30)

    def test_crowded_from_half_of_its_places_on(self) -> None:
        door = Door(4, "calls")
        door.enter("a")
        assert not door.crowded
        door.enter("a")
        assert door.crowded


def test_a_models_flood_leaves_room_for_another() -> None:
    shares = FairShares(8, "model", "model_share")
    for _ in range(7):
        shares.take("busy")
    with pytest.raises(Overloaded, match="model 'busy' has its share of the 8 requests in flight") as refused:
        shares.take("busy")
    assert refused.value.reason == "model_share"
    shares.take("other")
    shares.give("busy")
