"""Deadlines of runs, all kept by one thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from waiting import until

from bf16kit.runtime.deadlines import Deadlines


@pytest.fixture
def threads() -> Callable[[], int]:
    """How many threads for deadlines there are, but for those that there were: of runs in other tests."""
    before = set(threading.enumerate())
    return lambda: sum(thread.name == "deadlines" for thread in set(threading.enumerate()) - before)


def test_a_run_that_ends_in_time_is_let_be_and_leaves_no_thread(threads: Callable[[], int]) -> None:
    deadlines, over = Deadlines(linger_s=0.05), threading.Event()
    for _ in range(100):
        with deadlines.after(0.2, over.set):
            assert threads() <= 2, "one for all, and one that is just ending"
    until(lambda: threads() == 0)
    assert not over.is_set()


def test_a_run_that_takes_longer_is_told_so(threads: Callable[[], int]) -> None:
    deadlines, over = Deadlines(linger_s=0.05), threading.Event()
    begun = time.monotonic()
    with deadlines.after(0.1, over.set):
        assert over.wait(20)
        assert time.monotonic() - begun >= 0.1
    until(lambda: threads() == 0)


def test_a_deadline_that_is_earlier_than_those_before_is_kept() -> None:
    deadlines, over = Deadlines(linger_s=0.05), threading.Event()
    with deadlines.after(60.0, over.clear):
        until(lambda: deadlines._wakes_at > 0, 20, "the thread waits for that one")
        with deadlines.after(0.05, over.set):
            assert over.wait(20)


def test_of_many_at_once_those_are_told_that_take_too_long() -> None:
    deadlines, told = Deadlines(linger_s=0.05), set[int]()
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


def test_when_nothing_had_a_deadline_for_a_while_the_thread_ends_and_another_begins_with_the_next(
    threads: Callable[[], int],
) -> None:
    deadlines, over = Deadlines(linger_s=0.01), threading.Event()
    for _ in range(2):
        with deadlines.after(0.0, over.set):
            assert over.wait(20)
        until(lambda: threads() == 0)
        over.clear()


def test_where_the_system_has_no_thread_left_the_run_fails_and_the_next_may_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    deadlines, over = Deadlines(linger_s=0.05), threading.Event()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError), deadlines.after(0.0, over.set):
            raise AssertionError("it has begun")
    with deadlines.after(0.0, over.set):
        assert over.wait(20)
