"""The counts of all processes of a server, requested when they are needed."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from bf16kit.messages.errors import Unavailable
from service.peers.channel import Body
from service.telemetry.metrics import Metrics
from service.telemetry.modelmetrics import ModelMetrics
from service.workers import counts
from service.workers.counts import Counting

ROWS = "bf16kit_rows_total"


class Process:
    """The metrics of a worker, which answers when it is asked, if the test lets it."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.model: ModelMetrics = self.metrics.add("m", 1)
        self.asked: list[Future[Body]] = []
        self.silent = False

    def ask(self) -> Future[Body]:
        self.asked.append(Future())
        if not self.silent:
            self.answer()
        return self.asked[-1]

    def answer(self) -> None:
        families, complete = self.metrics.report()
        metrics = [family.as_json() for family in families]
        self.asked[-1].set_result({"metrics": metrics, "complete": complete, "statistics": []})


@pytest.fixture
def workers() -> dict[str, Process]:
    return {"worker 1": Process(), "worker 2": Process()}


@pytest.fixture
def counting(workers: dict[str, Process]) -> Counting:
    return Counting(Metrics(), lambda: {name: each.ask() for name, each in workers.items()}, lambda: [("m", 1)])


def rows(counting: Counting) -> float:
    return sum(series.value for series in counting.samples([ROWS]))


def exposed_rows(counting: Counting) -> float:
    lines = counting.expose()[0].decode().splitlines()
    return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{ROWS}{{"))


def test_every_reader_gets_current_counts(counting: Counting, workers: dict[str, Process]) -> None:
    for at, worker in enumerate(workers.values(), 1):
        worker.model.executed(at, 0.1)
    assert (rows(counting), exposed_rows(counting)) == (3, 3)
    workers["worker 1"].model.executed(4, 0.1)
    assert (exposed_rows(counting), rows(counting)) == (7, 7)


def test_a_report_after_a_model_was_forgotten_keeps_the_statistics(
    counting: Counting, workers: dict[str, Process]
) -> None:
    one = workers["worker 1"]
    one.model.executed(1, 0.1)
    families, complete = one.metrics.report()
    counting.receive("worker 1", {"metrics": [each.as_json() for each in families], "complete": complete})
    assert exposed_rows(counting) == 1


def test_the_last_counts_of_a_worker_that_does_not_answer_in_time_are_shown(
    counting: Counting, workers: dict[str, Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counts, "_TIMEOUT_SECONDS", 0.05)
    one, two = workers.values()
    one.model.executed(1, 0.1)
    assert rows(counting) == 1
    one.silent = True
    one.model.executed(10, 0.1)
    two.model.executed(100, 0.1)
    assert exposed_rows(counting) == 101
    one.answer()  # late
    one.asked.append(Future())
    one.asked[-1].set_exception(Unavailable("worker 1 of this server has ended"))
    assert exposed_rows(counting) == 111


def test_the_counts_of_a_worker_that_died_stay_whether_its_last_report_was_complete_or_not(
    counting: Counting, workers: dict[str, Process]
) -> None:
    workers["worker 1"].model.executed(5, 0.1)
    for _ in range(3):
        assert rows(counting) == 5
    counting.process_died("worker 1")
    workers["worker 1"] = Process()
    assert rows(counting) == 5
    workers["worker 1"].model.executed(2, 0.1)
    assert (rows(counting), exposed_rows(counting)) == (7, 7)
