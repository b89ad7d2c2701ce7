"""The counts of all processes of a server, added up when somebody reads them."""

import json
import math
import re
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from bf16kit.drift.metrics import SampleDrift
from bf16kit.messages.errors import Unavailable
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import RuntimeInfo
from bf16kit.service.contract import Duration
from bf16kit.service.peers.channel import Body
from bf16kit.service.request import Observation, Timings
from bf16kit.service.telemetry import metrics
from bf16kit.service.telemetry.metrics import Counting, Metrics
from bf16kit.service.telemetry.values import to_message

ROWS = "bf16kit_rows_total"


class Process:
    """A worker with a model, which answers when it is asked, if the test lets it."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.model = self.metrics.add("m", 1)
        self.asked: list[Future[Body]] = []
        self.silent = False

    def ran(self, rows: int) -> None:
        self.model.executed(1, rows, Timings(compute_infer=0.1))

    def ask(self) -> Future[Body]:
        self.asked.append(Future())
        if not self.silent:
            self.answer()
        return self.asked[-1]

    def answer(self) -> None:
        self.asked[-1].set_result(json.loads(json.dumps({"metrics": to_message(self.metrics.values())})))


Workers = dict[str, Process]


@pytest.fixture
def workers() -> Workers:
    return {"worker 1": Process(), "worker 2": Process()}


@pytest.fixture
def served() -> list[tuple[str, int]]:
    return [("m", 1)]


@pytest.fixture
def counting(workers: Workers, served: list[tuple[str, int]]) -> Counting:
    return Counting(Metrics(), lambda: {name: each.ask() for name, each in workers.items()}, lambda: served)


def value(counting: Counting, name: str = ROWS) -> float | None:
    return next((each.value for each in counting.samples() if each.name == name), None)


def test_every_reader_gets_the_current_counts_of_all_processes(workers: Workers) -> None:
    own = Metrics()
    counting = Counting(own, lambda: {name: each.ask() for name, each in workers.items()}, lambda: [("m", 1)])
    own.add("m", 1).executed(1, 100, Timings())
    for at, worker in enumerate(workers.values(), 1):
        worker.ran(at)
    line = f'{ROWS}{{model="m",version="1"}}'
    assert (value(counting), f"{line} 103.0" in counting.expose()[0].decode()) == (103, True)
    workers["worker 1"].ran(4)
    assert value(counting) == 107
    assert Counting(own, dict, list).expose()[0].decode().count(line) == 1


def test_the_last_counts_of_a_worker_that_does_not_answer_in_time_are_shown(
    counting: Counting, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "ANSWER_SECONDS", 0.05)
    one, two = workers.values()
    one.ran(1)
    assert value(counting) == 1
    one.silent = True
    one.ran(10)
    two.ran(100)
    assert value(counting) == 101
    one.answer()  # late
    one.asked.append(Future())
    one.asked[-1].set_exception(Unavailable("worker 1 of this server has ended"))
    assert value(counting) == 111


def test_no_counter_falls_when_a_worker_dies_and_what_nobody_had_read_is_lost(
    counting: Counting, workers: Workers
) -> None:
    def read() -> tuple[float | None, int]:
        return value(counting), counting.statistics()["m", 1].execution_count

    workers["worker 1"].ran(5)
    workers["worker 1"].model.queued(2)
    assert (read(), value(counting, "bf16kit_queue_depth")) == ((5, 1), 2)
    workers["worker 1"].ran(50)  # not read by anybody
    counting.process_died("worker 1")
    workers["worker 1"] = Process()
    assert (read(), value(counting, "bf16kit_queue_depth")) == ((5, 1), 0)
    workers["worker 1"].ran(2)
    assert read() == (7, 2)
    counting.forget("m", [2])
    counting.forget("other", [1])
    assert read() == (7, 2)
    counting.forget("m", [1])
    assert read() == (2, 1)


def test_no_counter_falls_whatever_the_order_of_events(counting: Counting, workers: Workers) -> None:
    workers.clear()
    seen = 0.0
    for process, rows in (
        *(("a", 1.0), ("b", 4.0), ("a", 7.0), ("a", None), ("b", 4.5), ("a", 0.0), ("a", 2.0)),
        *(("b", 1.0), ("b", None), ("a", None), ("a", 3.0), ("b", 0.5)),
    ):
        if rows is None:
            counting.process_died(process)
        else:
            counting.receive(process, {"metrics": to_message({("rows_total", "m", "1"): rows})})
        now = value(counting)
        assert now is not None
        assert now >= seen
        seen = now
    assert seen == 7 + 2 + 3 + 4.5 + 1 + 0.5


def test_counts_of_a_model_that_no_process_has_or_is_to_serve_are_removed(
    counting: Counting, workers: Workers, served: list[tuple[str, int]]
) -> None:
    for worker in workers.values():
        worker.ran(3)
        worker.metrics.refused("streams")
    assert value(counting) == 6
    served.clear()
    del workers["worker 2"]
    counting.process_died("worker 2")
    assert value(counting) == 6, "worker 1 has it still"
    workers["worker 1"].metrics.remove(workers["worker 1"].model)
    assert value(counting) is None
    workers.clear()
    counting.process_died("worker 1")
    assert sum(each.value for each in counting.samples() if each.name == "bf16kit_refused_total") == 2, "no model's"


def test_statistics_are_added_per_batch_size_and_shared_weights_count_once(
    counting: Counting, workers: Workers
) -> None:
    for worker, requests, sizes in zip(workers.values(), (3, 5), ((1, 4), (2, 4)), strict=True):
        worker.model.opened(7, [])
        for rows in sizes:
            worker.ran(rows)
        for _ in range(requests):
            worker.model.request(Observation("m", "1", "", "OK", 1e-7))
    seen = counting.statistics()["m", 1]
    assert (seen.success, seen.inference_count, seen.execution_count) == (Duration(8, 800), 11, 4)
    assert [(each.batch_size, each.compute_infer.count) for each in seen.batches] == [(1, 1), (2, 1), (4, 2)]
    assert (seen.last_inference_ms > 0, seen.weight_bytes) == (True, 7)


def measured(worker: Process, seconds: float) -> None:
    worker.model.opened(100, [TensorSpec("y", "float32", ("batch", 4), "logits")])
    info = RuntimeInfo("onnxruntime", "cpu", "cpu", "bf16-weights", "fp32")
    worker.model.loaded(info, {"y": {"relative_l2": 1e-3}}, {"relative_l2": 0.015})
    worker.model.request(Observation("m", "1", "", "OK", seconds, Timings(queue=0.2), trace=f"trace-{seconds}"))
    worker.model.drift("y", SampleDrift(2e-3, 1e-6, 0.5, math.inf, 1, 2, nonfinite=0))
    worker.model.ready(is_ready=seconds < 1)


@pytest.fixture
def exposed(counting: Counting, workers: Workers) -> Callable[[str], str]:
    for worker, seconds in zip(workers.values(), (3.0, 3.1), strict=True):
        measured(worker, seconds)
    measured(workers["worker 1"], 0.3)
    return lambda accept: counting.expose(accept)[0].decode()


def test_the_metrics_of_two_processes_are_exposed_as_one_servers(exposed: Callable[[str], str]) -> None:
    text = exposed("")
    for line in (
        'bf16kit_requests_total{code="OK",model="m",version="1"} 3.0',
        'bf16kit_request_duration_seconds_bucket{le="0.5",model="m",version="1"} 1.0',
        'bf16kit_request_duration_seconds_bucket{le="+Inf",model="m",version="1"} 3.0',
        'bf16kit_request_duration_seconds_count{model="m",version="1"} 3.0',
        'bf16kit_request_duration_seconds_sum{model="m",version="1"} 6.4',
        'bf16kit_model_ready{model="m",version="1"} 0.0',
        'bf16kit_model_weight_bytes{model="m",version="1"} 100.0',
        'bf16kit_drift_baseline{metric="relative_l2",model="m",output="y",version="1"} 0.001',
    ):
        assert line in text
    assert len(re.findall(r"^process_resident_memory_bytes ", text, re.MULTILINE)) == 1
    assert re.search(r"^python_info\{[^}]*\} 1\.0$", text, re.MULTILINE), "a version is no sum"
    assert "_created" not in text


def test_exemplars_name_the_newest_trace_of_a_bucket_in_openmetrics(exposed: Callable[[str], str]) -> None:
    text = exposed("application/openmetrics-text; version=1.0.0")
    for limit, trace in (("0.5", "0.3"), ("5.0", "3.1")):
        assert re.search(rf'request_duration_seconds_bucket{{le="{limit}".* # {{trace_id="trace-{trace}"}}', text)
    assert text.endswith("# EOF\n")


def test_the_sum_over_one_process_equals_its_own_metrics(counting: Counting, workers: Workers) -> None:
    del workers["worker 2"]
    measured(workers["worker 1"], 0.3)
    both = [each.expose()[0].decode().splitlines() for each in (counting, workers["worker 1"].metrics)]
    summed, alone = ([line for line in lines if "bf16kit_" in line] for lines in both)
    assert summed == alone
