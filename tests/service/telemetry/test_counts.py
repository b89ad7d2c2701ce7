"""The counts of all processes of a server, added up when somebody reads them."""

from __future__ import annotations

import json
from concurrent.futures import Future

import pytest

from bf16kit.messages.errors import Unavailable
from service.contract import BatchStatistics, Duration, StatisticsSnapshot
from service.operations import VersionStatistics
from service.peers.channel import Body, to_json
from service.telemetry import counts
from service.telemetry.counts import Counting
from service.telemetry.metrics import Metrics

ROWS = "bf16kit_rows_total"


class Process:
    """A worker with a model, which answers when it is asked, if the test lets it."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.model = self.metrics.add("m", 1)
        self.statistics = StatisticsSnapshot()
        self.asked: list[Future[Body]] = []
        self.silent = False

    def ask(self) -> Future[Body]:
        self.asked.append(Future())
        if not self.silent:
            self.answer()
        return self.asked[-1]

    def answer(self) -> None:
        statistics = (VersionStatistics("m", 1, "cpu", self.statistics),)
        body = {
            "metrics": [family.as_json() for family in self.metrics.snapshot()],
            "statistics": to_json(statistics, tuple[VersionStatistics, ...]),
        }
        self.asked[-1].set_result(json.loads(json.dumps(body)))


@pytest.fixture
def workers() -> dict[str, Process]:
    return {"worker 1": Process(), "worker 2": Process()}


@pytest.fixture
def own() -> Metrics:
    return Metrics()


@pytest.fixture
def counting(own: Metrics, workers: dict[str, Process]) -> Counting:
    return Counting(own, lambda: {name: each.ask() for name, each in workers.items()}, lambda: [("m", 1)])


def exposed(counting: Counting, name: str = ROWS) -> float:
    lines = counting.expose()[0].decode().splitlines()
    return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))


def test_every_reader_gets_the_current_counts_of_all_processes(
    counting: Counting, own: Metrics, workers: dict[str, Process]
) -> None:
    own.add("m", 1).executed(100, 0.1)
    for at, worker in enumerate(workers.values(), 1):
        worker.model.executed(at, 0.1)
    assert (sum(series.value for series in counting.samples([ROWS])), exposed(counting)) == (103, 103)
    workers["worker 1"].model.executed(4, 0.1)
    assert exposed(counting) == 107
    workers.clear()
    alone = Counting(own, dict, list)
    assert alone.expose()[0].decode().count(f"{ROWS}{{") == 1


def test_the_last_counts_of_a_worker_that_does_not_answer_in_time_are_shown(
    counting: Counting, workers: dict[str, Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counts, "_TIMEOUT_SECONDS", 0.05)
    one, two = workers.values()
    one.model.executed(1, 0.1)
    assert exposed(counting) == 1
    one.silent = True
    one.model.executed(10, 0.1)
    two.model.executed(100, 0.1)
    assert exposed(counting) == 101
    one.answer()  # late
    one.asked.append(Future())
    one.asked[-1].set_exception(Unavailable("worker 1 of this server has ended"))
    assert exposed(counting) == 111


def test_no_counter_falls_when_a_worker_dies_and_what_nobody_had_read_is_lost(
    counting: Counting, workers: dict[str, Process]
) -> None:
    workers["worker 1"].model.executed(5, 0.1)
    workers["worker 1"].statistics = did(5, 1)
    assert exposed(counting) == 5
    assert counting.statistics()["m", 1].success.count == 5
    workers["worker 1"].model.executed(50, 0.1)  # not read by anybody
    counting.process_died("worker 1")
    workers["worker 1"] = Process()
    assert exposed(counting) == 5
    workers["worker 1"].model.executed(2, 0.1)
    assert (exposed(counting), counting.statistics()["m", 1].success.count) == (7, 5)
    counting.receive("worker 1", {"metrics": []})  # a process without statistics, or the last counts of a drain
    counting.forget("m", [1])
    assert (exposed(counting), counting.statistics()["m", 1].success.count) == (2, 0)


def did(requests: int, *sizes: int) -> StatisticsSnapshot:
    """Return statistics of ``requests`` requests, with one batch of each of ``sizes``."""
    each = Duration(1, 10)
    return StatisticsSnapshot(
        last_inference_ms=requests,
        inference_count=sum(sizes),
        execution_count=len(sizes),
        success=Duration(requests, requests * 100),
        batches=tuple(BatchStatistics(size, each, each, each) for size in sizes),
        weight_bytes=7,
    )


def test_statistics_are_added_per_batch_size_and_shared_weights_count_once(
    counting: Counting, workers: dict[str, Process]
) -> None:
    workers["worker 1"].statistics, workers["worker 2"].statistics = did(3, 1, 4), did(5, 2, 4)
    seen = counting.statistics()["m", 1]
    assert (seen.success, seen.inference_count, seen.execution_count) == (Duration(8, 800), 11, 4)
    assert [(each.batch_size, each.compute_infer.count) for each in seen.batches] == [(1, 1), (2, 1), (4, 2)]
    assert (seen.last_inference_ms, seen.weight_bytes) == (5, 7)
