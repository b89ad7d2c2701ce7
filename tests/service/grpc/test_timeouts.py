"""Calls that keep the server waiting are ended, here with the test's own clock."""

from __future__ import annotations

import pytest

from service.grpc.timeouts import CallTimeouts


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
