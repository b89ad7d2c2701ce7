"""Limits of calls: by number, by bytes, by each client's share, and by the time that they keep the server waiting."""

import threading
import time

import pytest

from bf16kit.messages.errors import Overloaded
from bf16kit.service.grpc.admission import ByteBudget, MessageBytes, Permit, Shares
from bf16kit.service.grpc.timeouts import CallTimeouts


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


@pytest.fixture
def budget() -> ByteBudget:
    return ByteBudget(100)


def message(budget: ByteBudget) -> MessageBytes:
    return MessageBytes(Permit(None, budget, "a"))


def test_the_largest_of_several_sizes_of_one_request_counts_and_its_response_in_addition(budget: ByteBudget) -> None:
    held = message(budget)
    for nbytes in (10, 60, 30):
        held.reserve(nbytes)
    assert budget.in_use == 60
    held.reserve_more(150)  # allowed, because no other call holds bytes
    assert budget.in_use == 210
    held.release()
    assert budget.in_use == 0


def test_each_request_of_a_stream_counts_until_it_is_released(budget: ByteBudget) -> None:
    stream = Permit(None, budget, "a")
    first, second, other = MessageBytes(stream), MessageBytes(stream), message(budget)
    first.reserve(30)
    second.reserve(50)
    with pytest.raises(Overloaded):
        other.reserve(21)
    first.release()
    first.release()
    assert stream.nbytes == 50
    other.reserve(50)
    with pytest.raises(Overloaded):
        second.reserve_more(1)
    stream.release()
    other.reserve_more(50)


# --- timeouts, with the test's own clock ------------------------------------------------------------------------------


class Times:
    def __init__(self) -> None:
        self.now = 0.0
        self.ended: list[object] = []

    def __call__(self) -> float:
        return self.now

    def begin(self, timeouts: CallTimeouts, *calls: str) -> None:
        for call in calls:
            timeouts.start(call, lambda call=call: self.ended.append(call))  # type: ignore[misc]

    def after(self, seconds: float, timeouts: CallTimeouts) -> list[object]:
        self.now += seconds
        timeouts.end_expired()
        return self.ended


@pytest.fixture
def times() -> Times:
    return Times()


def test_a_call_that_takes_too_long_is_ended_once_and_one_that_is_done_is_not(times: Times) -> None:
    timeouts = CallTimeouts(10, 1, clock=times)
    times.begin(timeouts, "a", "done")
    timeouts.clear("done")
    timeouts.clear("never begun")
    assert times.after(9, timeouts) == []
    times.begin(timeouts, "b")
    assert times.after(2, timeouts) == ["a"]
    assert times.after(7, timeouts) == ["a"]
    assert times.after(2, timeouts) == ["a", "b"]


def test_the_timeout_is_shorter_while_the_server_is_crowded(times: Times) -> None:
    under_pressure = False
    timeouts = CallTimeouts(10, 2, lambda: under_pressure, clock=times)
    times.begin(timeouts, "a")
    assert times.after(3, timeouts) == []
    under_pressure = True
    assert times.after(0, timeouts) == ["a"]


def test_only_a_few_slow_calls_may_use_the_whole_timeout(times: Times) -> None:
    """Each of them may hold a message of the largest size."""
    timeouts = CallTimeouts(10, 1, max_slow=2, clock=times)
    times.begin(timeouts, "a", "b", "c")
    assert times.after(0.5, timeouts) == []
    times.begin(timeouts, "d")
    assert times.after(0.6, timeouts) == ["c"]
    timeouts.clear("a")
    assert times.after(1, timeouts) == ["c"]


def test_an_error_in_ending_one_call_does_not_stop_the_others(times: Times) -> None:
    timeouts = CallTimeouts(1, 1, clock=times)
    timeouts.start("bad", lambda: 1 // 0)  # type: ignore[arg-type]
    times.begin(timeouts, "good")
    assert times.after(2, timeouts) == ["good"]
