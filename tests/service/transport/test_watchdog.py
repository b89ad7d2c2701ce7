"""The watchdog ends calls that keep the server waiting, here with the test's own clock."""

from __future__ import annotations

import pytest
from waiting import until

from service.transport.watchdog import Patience, Watchdog


class Times:
    def __init__(self) -> None:
        self.now = 0.0
        self.ended: list[object] = []

    def __call__(self) -> float:
        return self.now

    def begin(self, patience: Patience, *calls: str) -> None:
        for call in calls:
            patience.begin(call, lambda call=call: self.ended.append(call))  # type: ignore[misc]

    def after(self, seconds: float, patience: Patience) -> list[object]:
        self.now += seconds
        patience.end_overdue()
        return self.ended


@pytest.fixture
def times() -> Times:
    return Times()


def test_a_call_that_takes_too_long_is_ended_once(times: Times) -> None:
    patience = Patience(10, 1, clock=times)
    times.begin(patience, "a")
    assert times.after(9, patience) == []
    times.begin(patience, "b")
    assert times.after(2, patience) == ["a"]
    assert times.after(7, patience) == ["a"]
    assert times.after(2, patience) == ["a", "b"]


def test_a_call_that_is_done_is_not_ended(times: Times) -> None:
    patience = Patience(10, 1, clock=times)
    times.begin(patience, "a")
    patience.done("a")
    patience.done("never begun")
    assert times.after(60, patience) == []


def test_the_timeout_is_shorter_while_the_server_is_crowded(times: Times) -> None:
    crowded = False
    patience = Patience(10, 2, lambda: crowded, clock=times)
    times.begin(patience, "a")
    assert times.after(3, patience) == []
    crowded = True
    assert times.after(0, patience) == ["a"]


def test_only_a_few_slow_calls_may_use_the_whole_timeout(times: Times) -> None:
    """Each of them may hold a message of the largest size."""
    patience = Patience(10, 1, slow=2, clock=times)
    times.begin(patience, "a", "b", "c")
    assert times.after(0.5, patience) == []
    times.begin(patience, "d")
    assert times.after(0.6, patience) == ["c"]
    patience.done("a")
    assert times.after(1, patience) == ["c"]


def test_during_a_stop_a_call_gets_half_of_the_remaining_time(times: Times) -> None:
    patience = Patience(30, 3, clock=times)
    times.begin(patience, "a")
    assert times.after(8, patience) == []
    patience.stop(20)  # 12 s remain for "a" at first
    times.begin(patience, "b")
    assert times.after(9.9, patience) == []
    assert times.after(0.2, patience) == ["a", "b"]
    times.begin(patience, "c")  # 9.9 s before the end
    assert times.after(4.9, patience) == ["a", "b"]
    assert times.after(0.1, patience) == ["a", "b", "c"]
    times.after(4, patience)
    times.begin(patience, "d")  # 0.9 s before the end
    assert times.after(0.9, patience) == ["a", "b", "c"]
    assert times.after(0.2, patience) == ["a", "b", "c", "d"]


def test_a_stop_does_not_extend_a_timeout(times: Times) -> None:
    patience = Patience(10, 3, clock=times)
    times.begin(patience, "a")
    patience.stop(3600)
    assert times.after(10.1, patience) == ["a"]


def test_an_error_in_ending_one_call_does_not_stop_the_watchdog() -> None:
    ended: list[str] = []

    def fail() -> None:
        raise ValueError("no such call")

    patience = Patience(0, 0)
    dog = Watchdog([patience])
    patience.begin("bad", fail)
    dog.start()
    patience.begin("good", lambda: ended.append("good"))
    until(lambda: ended, what="the second call to be ended")
    dog.stop()


def test_stopping_a_watchdog_that_never_started_is_harmless() -> None:
    Watchdog([]).stop()
