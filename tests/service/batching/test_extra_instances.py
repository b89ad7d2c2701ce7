"""A batch of another shape runs beside a running batch, and no waiting request is overtaken."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future

import numpy as np
import pytest
from beginning import begun
from waiting import until

from service.batching import batcher as batching
from service.batching.batcher import Batcher
from service.batching.queue import BatchPolicy
from service.contract import Array
from service.request import Reply, Request, Timings


class Runtime:
    """A runtime that doubles x of any width. A test can hold the runs of a width."""

    def __init__(self) -> None:
        self.held: dict[int, threading.Event] = {}
        self.begun: list[tuple[int, int]] = []  # rows and width

    def __call__(self, feeds: Mapping[str, Array], outputs: Sequence[str] | None) -> tuple[dict[str, Array], str]:
        rows, width = feeds["x"].shape
        self.begun.append((rows, width))
        if not width:
            raise IndexError
        if (gate := self.held.get(width)) is not None:
            assert gate.wait(20)
        return {"y": feeds["x"] * 2}, "bf16"


class Bench:
    """A batcher with its runtime. It is its own observer."""

    def __init__(self, policy: BatchPolicy) -> None:
        self.run, self.depth = Runtime(), 0
        self.batcher = Batcher(self.run, policy, self)
        self.batcher.start()

    def rejected(self, reason: str) -> None: ...

    def queued(self, change: int) -> None:
        self.depth += change

    def executed(self, requests: int, rows: int, timings: Timings) -> None: ...

    def call(self, width: int) -> Future[Reply]:
        asked = Request({"x": np.ones((1, width), np.float32)}, rows=1)
        return begun(self.batcher.begin, asked)

    def hold(self, width: int) -> Future[Reply]:
        """Start a request of ``width`` that runs until :meth:`let_go`. Return its future."""
        self.run.held[width] = threading.Event()
        begun = len(self.run.begun)
        held = self.call(width)
        until(lambda: len(self.run.begun) > begun)
        return held

    def queue(self, width: int) -> Future[Reply]:
        """Submit a request. Return its future once the request waits."""
        depth = self.depth
        waiting = self.call(width)
        until(lambda: self.depth > depth)
        return waiting

    def let_go(self, width: int) -> None:
        self.run.held.pop(width).set()

    def close(self) -> None:
        for gate in self.run.held.values():
            gate.set()
        self.batcher.close()


Make = Callable[..., Bench]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr(batching, "LONG_S", 0.0)  # every run is long enough to run beside others
    benches: list[Bench] = []

    def build(**policy: object) -> Bench:
        defaults: dict[str, object] = {"axis": 0, "max_rows": 8, "extra_instances": 1}
        benches.append(Bench(BatchPolicy(**{**defaults, **policy})))  # type: ignore[arg-type]  # its fields
        return benches[-1]

    yield build
    for bench in benches:
        bench.close()


def test_a_short_request_does_not_wait_for_a_long_one(make: Make) -> None:
    bench = make()
    long = bench.hold(64)
    assert bench.call(4).result(20).outputs["y"].shape == (1, 4)
    assert not long.done()


def test_requests_of_the_shape_that_runs_wait_and_share_a_batch(make: Make) -> None:
    bench = make()
    first = bench.hold(4)
    rest = [bench.queue(4) for _ in range(3)]
    bench.let_go(4)
    for future in (first, *rest):
        future.result(20)
    assert bench.run.begun == [(1, 4), (3, 4)]


def test_no_request_overtakes_one_that_waits_for_its_shape(make: Make) -> None:
    bench = make()
    bench.hold(4)
    second, other = bench.queue(4), bench.queue(8)
    assert bench.run.begun == [(1, 4)]
    bench.let_go(4)
    second.result(20)
    other.result(20)
    assert bench.run.begun == [(1, 4), (1, 4), (1, 8)]


def test_no_more_batches_run_at_once_than_allowed(make: Make) -> None:
    bench = make()
    bench.hold(64)
    bench.hold(32)
    third = bench.queue(4)
    assert bench.run.begun == [(1, 64), (1, 32)]
    bench.let_go(64)
    third.result(20)


def test_an_executor_that_takes_a_batch_wakes_another_for_the_next_one_beside_it(make: Make) -> None:
    """Nothing else wakes the other thread: it went to sleep because the first waiting request could not begin."""
    bench = make()
    bench.hold(64)
    bench.queue(64)
    short = bench.queue(4)
    long, bench.run.held[64] = bench.run.held[64], threading.Event()
    long.set()
    short.result(20)
    assert bench.run.begun == [(1, 64), (1, 64), (1, 4)]


@pytest.mark.parametrize("policy", [{"extra_instances": 0}, {"max_delay_s": 1e-3}, {"max_rows": 0}])
def test_one_batch_runs_at_a_time_without_an_extra_one_with_a_delay_or_without_batching(
    make: Make, policy: dict[str, object]
) -> None:
    bench = make(**policy)
    bench.hold(64)
    bench.queue(4)
    assert bench.run.begun == [(1, 64)]


def test_a_quick_request_waits_for_the_running_one(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run shorter than ``LONG_S`` gains nothing beside others: waking a thread for it takes as long."""
    monkeypatch.setattr(batching, "LONG_S", 10.0)
    bench = make()
    bench.call(4).result(20)
    bench.hold(64)
    bench.queue(4)
    assert bench.run.begun == [(1, 4), (1, 64)]


def test_a_batch_that_fails_gives_its_place_back(make: Make) -> None:
    bench = make()
    bench.hold(64)
    with pytest.raises(IndexError):
        bench.call(0).result(20)
    assert bench.call(8).result(20).outputs["y"].shape == (1, 8)
