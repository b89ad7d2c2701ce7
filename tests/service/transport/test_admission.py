"""What is let in: by count, by bytes, and by who asks."""

from __future__ import annotations

import threading
import time

import pytest

from bf16kit.errors import Overloaded, Unavailable
from service.transport.admission import Door, FairShares, Shares


class TestShares:
    def test_one_holder_alone_never_gets_the_last_eighth(self) -> None:
        shares = Shares(16)
        assert [shares.take("flood") for _ in range(16)] == [True] * 14 + [False] * 2

    def test_half_of_the_places_go_to_whoever_comes(self) -> None:
        shares = Shares(16)
        for holder in "abc":
            assert shares.take(holder)
        assert all(shares.take("d") for _ in range(5))

    def test_when_places_are_few_each_holder_has_an_equal_part(self) -> None:
        shares = Shares(16)
        while shares.take("flood"):
            pass
        assert shares.take("other")
        shares.give("flood")
        assert not shares.take("flood")  # it holds 13, and its part is 8 now
        assert shares.take("other")

    def test_a_holder_that_has_left_has_no_part(self) -> None:
        shares = Shares(4)
        shares.take("a"), shares.take("b")
        shares.give("b")
        assert shares.take("a")
        assert shares.take("a")

    def test_there_is_a_place_for_a_newcomer_however_many_there_are(self) -> None:
        shares = Shares(4)
        assert [shares.take(holder) for holder in "abcd"] == [True] * 4


class TestDoor:
    def test_one_more_than_the_limit_is_refused_and_says_the_limit(self) -> None:
        door = Door(2, "requests in flight")
        places = [door.enter(), door.enter()]
        with pytest.raises(Overloaded, match="2 requests in flight is the limit") as refused:
            door.enter()
        assert refused.value.reason == "in_flight"
        places[0].leave()
        door.enter()

    def test_a_place_is_given_back_once(self) -> None:
        door = Door(1, "calls")
        place = door.enter()
        place.claim("a")
        place.hold(10)
        place.leave()
        place.leave()
        door.enter().hold(1)
        with pytest.raises(Overloaded):
            door.enter()

    def test_bytes_are_bounded_but_for_a_request_alone(self) -> None:
        door = Door(10, "calls", max_bytes=100)
        first, second = door.enter(), door.enter()
        first.hold(150)
        with pytest.raises(Overloaded, match="requests of 150 bytes are held, the limit is 100") as refused:
            second.hold(1)
        assert refused.value.reason == "bytes"
        first.leave()
        second.hold(100)

    def test_what_arrives_after_its_call_has_ended_is_not_counted(self) -> None:
        door = Door(2, "calls", max_bytes=100)
        place = door.enter()
        place.leave()
        place.claim("a")
        place.hold(60)
        other = door.enter()
        other.hold(60)
        other.hold(40)

    def test_a_clients_share_is_refused_with_its_reason(self) -> None:
        door = Door(8, "calls")
        for _ in range(7):
            door.enter().claim("flood")
        with pytest.raises(Overloaded, match="this connection has its share") as refused:
            door.enter().claim("flood")
        assert refused.value.reason == "connection_share"

    def test_closed_it_tells_everybody_why(self) -> None:
        door = Door(8, "calls")
        door.close(lambda: Unavailable("going away"))
        with pytest.raises(Unavailable, match="going away"):
            door.enter()

    def test_waiting_for_the_last_to_leave(self) -> None:
        door = Door(8, "calls")
        assert door.wait_empty(time.monotonic() - 1)
        place = door.enter()
        assert not door.wait_empty(time.monotonic() + 0.01)
        threading.Timer(0.02, place.leave).start()
        assert door.wait_empty(time.monotonic() + 30)

    def test_crowded_from_half_of_its_places_on(self) -> None:
        door = Door(4, "calls")
        door.enter()
        assert not door.crowded
        door.enter()
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
