"""Responses in the order of requests, several in flight at once, and a limited number read ahead."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from service.grpc.streams import OrderedResponses


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def test_requests_run_concurrently_and_are_answered_in_order(pool: ThreadPoolExecutor) -> None:
    together = threading.Barrier(3, timeout=30)

    def answer(request: int) -> int:
        together.wait()  # passes only when three run at once
        return request * 10

    assert list(OrderedResponses(iter([1, 2, 3]), answer, pool, pool, window=3)) == [10, 20, 30]


def test_no_more_than_the_window_is_read_ahead(pool: ThreadPoolExecutor) -> None:
    read: list[int] = []
    release = threading.Event()
    full = threading.Event()

    def requests() -> Iterator[int]:
        for n in range(10):
            read.append(n)
            if len(read) == 2:
                full.set()
            yield n

    def answer(request: int) -> int:
        release.wait(30)
        return request

    answers = iter(OrderedResponses(requests(), answer, pool, pool, window=2))
    taker = pool.submit(list, answers)
    assert full.wait(30)
    assert len(read) == 2
    release.set()
    assert taker.result(30) == list(range(10))


def test_closing_ends_the_iteration_and_frees_the_reader(pool: ThreadPoolExecutor) -> None:
    def endless() -> Iterator[int]:
        while True:
            yield 1

    answers = OrderedResponses(endless(), lambda request: request, pool, pool, window=1)
    taken = iter(answers)
    assert next(taken) == 1
    answers.close()
    assert all(answer == 1 for answer in taken)


def test_an_error_in_the_requests_is_raised_after_the_responses_before_it(pool: ThreadPoolExecutor) -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise ConnectionError("the caller left")

    taken = iter(OrderedResponses(broken(), lambda request: request, pool, pool, window=4))
    assert next(taken) == 1
    with pytest.raises(ConnectionError):
        next(taken)
