"""Deadlines of runs. One thread watches all of them."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from waiting import until

from bf16kit.runtime.deadlines import Deadlines


def test_only_the_callback_of_a_run_that_takes_too_long_is_called_and_one_thread_watches() -> None:
    deadlines, over = Deadlines(), threading.Event()
    before = threading.active_count()
    for _ in range(100):
        with deadlines.after(0.2, over.set):
            assert threading.active_count() <= before + 1
    time.sleep(0.3)
    assert not over.is_set()
    begun = time.monotonic()
    with deadlines.after(0.1, over.set):
        assert over.wait(20)
        assert time.monotonic() - begun >= 0.1


def test_a_deadline_earlier_than_the_pending_ones_is_met() -> None:
    deadlines, over = Deadlines(), threading.Event()
    with deadlines.after(60.0, over.clear):
        until(lambda: deadlines._wakes_at > 0, 20, "the thread waits for that one")
        with deadlines.after(0.05, over.set):
            assert over.wait(20)


def test_of_many_concurrent_runs_only_the_late_ones_get_their_callback() -> None:
    deadlines, told = Deadlines(), set[int]()
    held = threading.Event()

    def run(number: int) -> None:
        late = number % 3 == 0
        with deadlines.after(0.01 * (1 + number % 7) if late else 30.0, lambda: told.add(number)):
            if late:
                until(lambda: number in told)
            else:
                assert held.wait(20)

    with ThreadPoolExecutor(48) as pool:
        runs = [pool.submit(run, number) for number in range(48)]
        until(lambda: told == set(range(0, 48, 3)))
        held.set()
        assert [each.result(20) for each in runs] == [None] * 48
    assert told == set(range(0, 48, 3))
    assert deadlines._waiting == set()


def test_if_no_thread_can_start_the_run_fails_and_a_later_run_can_succeed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    deadlines, over = Deadlines(), threading.Event()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError), deadlines.after(0.0, over.set):
            raise AssertionError("it has begun")
    with deadlines.after(0.0, over.set):
        assert over.wait(20)
