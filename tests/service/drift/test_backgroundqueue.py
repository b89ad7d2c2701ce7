"""A thread that starts only when there is work."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest
from waiting import until

from service.drift.backgroundqueue import BackgroundQueue


class Rig:
    """Records the groups of items that it gets; a test can hold it."""

    def __init__(self) -> None:
        self.done: list[list[int]] = []
        self.go = threading.Event()
        self.go.set()

    def work(self, items: Sequence[int]) -> None:
        assert self.go.wait(30)
        self.done.append(list(items))


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.go.set()


def threads(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def test_the_thread_starts_with_the_first_item(rig: Rig) -> None:
    begun: list[str] = []
    late = BackgroundQueue("late", rig.work, on_start=lambda: begun.append(threading.current_thread().name))
    assert threads("late") == 0
    assert late.put(1)
    until(lambda: rig.done == [[1]])
    assert (threads("late"), begun) == (1, ["late"])
    assert late.end() == []
    assert late.join()
    assert threads("late") == 0


def test_waiting_items_are_processed_together_up_to_the_limit(rig: Rig) -> None:
    rig.go.clear()
    late = BackgroundQueue("late", rig.work, max_batch=2)
    for item in range(6):
        late.put(item)
    rig.go.set()
    until(lambda: sum(map(len, rig.done)) == 6)
    assert [item for items in rig.done for item in items] == list(range(6))
    assert max(map(len, rig.done)) == 2
    late.end()
    assert late.join()


def test_items_that_come_soon_after_the_first_are_processed_with_it(rig: Rig) -> None:
    late = BackgroundQueue("late", rig.work, gather_s=0.5)
    for item in range(5):
        late.put(item)
    until(lambda: rig.done == [[0, 1, 2, 3, 4]])
    late.end()
    assert late.join()


def test_the_number_of_waiting_items_is_limited(rig: Rig) -> None:
    rig.go.clear()
    late = BackgroundQueue("late", rig.work, max_waiting=2, max_batch=1)
    assert late.put(0)
    until(lambda: not late._items, 20, "at work")
    assert [late.put(1), late.put(2)] == [True, True]
    assert not late.put(3)
    assert late.end() == [1, 2]


def test_end_returns_the_waiting_items_and_the_running_ones_are_finished(rig: Rig) -> None:
    late = BackgroundQueue("late", rig.work, gather_s=60.0)
    late.put(1)
    assert (late.end(), late.put(2), late.ended) == ([1], False, True)
    assert late.join(), "it does not gather to the end"
    rig.go.clear()
    late = BackgroundQueue("late", rig.work, max_batch=1)
    late.put(3)
    until(lambda: not late._items, 20, "at work")
    assert late.end() == []
    assert not late.join(0.0)
    rig.go.set()
    assert late.join()
    assert rig.done == [[3]]


def test_if_no_thread_can_be_started_nothing_waits_and_the_next_item_tries_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    late = BackgroundQueue("late", rig.work)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            late.put(1)
    assert late.join(), "there is nothing to wait for"
    late.put(2)
    until(lambda: rig.done == [[2]])
    late.end()
    assert late.join()


def test_the_threads_own_work_may_end_it(rig: Rig) -> None:
    ended: list[bool] = []
    late = BackgroundQueue[int]("late", lambda items: ended.append(late.end() == [] and late.join()))
    late.put(1)
    until(lambda: ended == [True])
    assert late.join()
