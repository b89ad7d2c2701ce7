"""Work that is repeated until it is stopped, whatever it raises."""

from __future__ import annotations

import logging
import threading

import pytest
from waiting import until

from service.config.loops import Guard, PeriodicThread


def test_an_error_is_logged_once_a_minute_with_its_traceback_and_the_next_steps_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now, ran, errors = 0.0, list[str](), [KeyError("first")] * 10 + [KeyError("second")] * 10
    guard = Guard(lambda: now)

    def fails() -> None:
        raise errors[0]

    while errors:
        guard.run("the first step", fails)
        guard.run("the second step", lambda: ran.append("ran"))
        errors.pop(0)
        now += 1.0
    assert len(ran) == 20
    assert [record.getMessage() for record in caplog.records] == ["the first step failed; it will run again"] * 2
    assert "raise errors[0]" in caplog.text
    assert "KeyError: 'second'" in caplog.text
    errors.append(KeyError("second"))
    now += 60
    guard.run("the first step", fails)
    assert len(caplog.records) == 3


def test_the_end_of_the_program_is_no_error_of_a_step() -> None:
    def ends() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        Guard().run("a step", ends)


def test_the_task_is_repeated_until_the_stop() -> None:
    ticks: list[str] = []
    ticking = PeriodicThread("clock", 0.001, lambda: ticks.append(threading.current_thread().name))
    assert ticks == []
    ticking.start()
    until(lambda: len(ticks) > 2)
    ticking.stop()
    assert set(ticks) == {"clock"}
    assert "clock" not in {thread.name for thread in threading.enumerate()}


def test_an_error_ends_nothing_and_a_thread_that_never_started_can_be_stopped(caplog: pytest.LogCaptureFixture) -> None:
    ticks: list[int] = []

    def fail() -> None:
        ticks.append(1)
        raise ValueError("out of order")

    ticking = PeriodicThread("clock", 0.001, fail)
    with caplog.at_level(logging.ERROR):
        ticking.start()
        until(lambda: len(ticks) > 2)
        ticking.stop()
    assert "clock failed; it will run again" in caplog.text
    PeriodicThread("clock", 1, lambda: None).stop()
