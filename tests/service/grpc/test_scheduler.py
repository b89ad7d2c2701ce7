"""Turns of streams' requests: by model, by connection, in order of arrival."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ClassVar

import pytest
from waiting import until

from service.grpc.scheduler import StreamScheduler, StreamTurns


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool
        for stream in Stream.opened:  # even if a test has failed: their readers would otherwise wait permanently
            stream.turns.close()
        Stream.opened.clear()


class Stream:
    """A reader that takes turns for requests to these models, and stops where it must wait."""

    opened: ClassVar[list[Stream]] = []

    def __init__(self, scheduler: StreamScheduler, client: str, models: list[str], pool: ThreadPoolExecutor) -> None:
        self.turns = StreamTurns(scheduler, client)
        self.entered: list[str] = []
        self._models = models
        self.opened.append(self)
        self.done: Future[None] = pool.submit(self._read)

    def _read(self) -> None:
        for model in self.turns.admitted(self._models, str):
            self.entered.append(model)


def test_a_request_gets_its_turn_at_once_if_there_is_room() -> None:
    scheduler = StreamScheduler(4)
    for _ in range(3):
        turns = StreamTurns(scheduler, "somebody")
        assert list(turns.admitted(["a", "b"], str)) == ["a", "b"]
        turns.release("a")
        turns.release("b")


@pytest.mark.parametrize("shared", ["model", "client"])
def test_a_request_waits_if_its_model_or_client_has_its_share(shared: str, pool: ThreadPoolExecutor) -> None:
    scheduler = StreamScheduler(32)
    greedy = [
        Stream(scheduler, "c" if shared == "client" else f"c{n}", ["m" if shared == "model" else f"m{n}"] * 20, pool)
        for n in range(4)
    ]
    until(lambda: sum(len(stream.entered) for stream in greedy) >= 28)
    threading.Event().wait(0.1)
    assert sum(len(stream.entered) for stream in greedy) == 28  # the last eighth is for other holders
    other = Stream(scheduler, "other", ["other"], pool)
    other.done.result(30)
    assert other.entered == ["other"]


def test_returned_turns_go_to_the_waiting_requests_in_order(pool: ThreadPoolExecutor) -> None:
    scheduler = StreamScheduler(1)
    first = Stream(scheduler, "a", ["m"], pool)
    first.done.result(30)
    waiting = []
    for n in range(3):
        waiting.append(Stream(scheduler, f"w{n}", ["m"], pool))
        until(lambda n=n: len(scheduler._waiting) == n + 1)  # type: ignore[misc]
    before = first
    for stream in waiting:
        assert stream.entered == []
        before.turns.release("m")
        stream.done.result(30)
        before = stream
    before.turns.release("m")
    assert scheduler._models.in_use == scheduler._clients.in_use == 0


def test_a_turn_skips_requests_whose_model_has_its_share(pool: ThreadPoolExecutor) -> None:
    scheduler = StreamScheduler(32)
    greedy = Stream(scheduler, "a", ["m"] * 29, pool)
    until(lambda: len(scheduler._waiting) == 1)
    last = [Stream(scheduler, f"x{n}", [f"x{n}"], pool) for n in range(4)]
    for stream in last:
        stream.done.result(30)
    waiting = [Stream(scheduler, client, [model], pool) for client, model in (("b", "m"), ("c", "n"))]
    until(lambda: len(scheduler._waiting) == 3)
    last[0].turns.release("x0")
    waiting[1].done.result(30)
    assert (len(greedy.entered), waiting[0].entered, waiting[1].entered) == (28, [], ["n"])
    for _ in range(28):  # they are skipped only until their model has room
        greedy.turns.release("m")
    for stream in (greedy, waiting[0]):
        stream.done.result(30)


def test_a_closed_line_ends_its_wait_and_takes_no_turn(pool: ThreadPoolExecutor) -> None:
    scheduler = StreamScheduler(1)
    first = Stream(scheduler, "a", ["m"], pool)
    first.done.result(30)
    left, next_one = Stream(scheduler, "b", ["m"], pool), Stream(scheduler, "b", ["n"], pool)
    until(lambda: len(scheduler._waiting) == 2)
    left.turns.close()
    left.turns.close()
    left.done.result(30)
    assert left.entered == []
    first.turns.release("m")
    next_one.done.result(30)
    assert list(left.turns.admitted(["m"], str)) == []
    next_one.turns.close()  # its request runs, and keeps its turn
    assert scheduler._models.in_use == scheduler._clients.in_use == 1
    next_one.turns.release("n")
    assert scheduler._models.in_use == scheduler._clients.in_use == 0
