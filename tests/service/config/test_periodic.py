"""A thread that repeats one task."""

from __future__ import annotations

import logging
import threading

import pytest
from waiting import until

from service.config.periodic import PeriodicThread


def test_the_task_is_repeated_until_the_stop() -> None:
    ticks: list[str] = []
    ticking = PeriodicThread("clock", 0.001, lambda: ticks.append(threading.current_thread().name))
    assert ticks == []
    ticking.start()
    until(lambda: len(ticks) > 2)
    ticking.stop()
    assert set(ticks) == {"clock"}
    assert "clock" not in {thread.name for thread in threading.enumerate()}


def test_an_error_is_logged_and_the_task_is_repeated(caplog: pytest.LogCaptureFixture) -> None:
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
    assert "out of order" in caplog.text


def test_a_thread_that_never_started_can_be_stopped() -> None:
    PeriodicThread("clock", 1, lambda: None).stop()
