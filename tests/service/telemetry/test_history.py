from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import pytest
from exposed import everything

from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import RuntimeInfo
from service.request import Observation, Timings
from service.telemetry.history import TICK_SECONDS, TICKS, WINDOW_TICKS, History, RecentActivity
from service.telemetry.metrics import Metrics
from service.telemetry.modelmetrics import ModelMetrics
from service.telemetry.readings import NAMES

KEY = ("m", "1")
INFO = RuntimeInfo("onnxruntime", "cpu", "cpu", "bf16-weights", "fp32")


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Watched:
    """Metrics, and their history with its own clock."""

    def __init__(self) -> None:
        self.metrics, self.clock = Metrics(), Clock()
        self.history = History(lambda: self.metrics.samples(NAMES), self.clock)

    def model(self) -> ModelMetrics:
        series = self.metrics.add("m", 1)
        series.opened(1024, [TensorSpec("y", "float32", ("batch", 4))])
        series.loaded(INFO, {"y": {"relative_l2": 1e-3}}, {"relative_l2": 0.015})
        return series

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            self.clock.now += TICK_SECONDS
            self.history.tick()

    @property
    def recent(self) -> RecentActivity:
        return self.history.read()[0][KEY]


def answered(code: str = "OK", seconds: float = 0.3, queue: float = 0.1) -> Observation:
    return Observation("m", "1", "", code, seconds, Timings(queue))


def test_events_since_the_last_tick_count_at_once() -> None:
    watched = Watched()
    series = watched.model()
    for _ in range(3):
        series.request(answered())
    series.rejected("queue_full")
    series.executed(8, 0.02)
    series.sampled("measured", 2)
    watched.clock.now += 4
    recent = watched.recent
    assert recent.counts == recent.total
    assert (recent.counts.codes, recent.counts.rejected) == ({"OK": 3}, {"queue_full": 1})
    assert (recent.counts.rows, recent.counts.batches, recent.counts.samples) == (8, 1, {"measured": 2})
    assert (recent.seconds, recent.per_second(8)) == (4.0, 2.0)
    assert recent.request.mean == pytest.approx(0.3)
    assert recent.request.p50 is not None
    assert 0.25 < recent.request.p50 <= 0.5


def test_the_window_drops_older_events_and_the_total_keeps_them() -> None:
    watched = Watched()
    series = watched.model()
    series.request(answered())
    watched.tick(WINDOW_TICKS)
    assert watched.recent.counts.codes == {"OK": 1}
    watched.tick()
    assert watched.recent.counts.codes == {}
    assert watched.recent.total.codes == {"OK": 1}
    assert watched.recent.request.p99 is None
    assert watched.recent.seconds == WINDOW_TICKS * TICK_SECONDS


def test_the_trend_has_a_point_for_each_of_the_last_ticks() -> None:
    watched = Watched()
    series = watched.model()
    series.request(answered())
    watched.tick()
    series.budget_ratio("y", "relative_l2", 0.25, 0.25, 0.25)
    series.budget_ratio("y", "max_abs", 0.5, 0.5, 0.5)
    for _ in range(20):
        series.request(answered(seconds=0.002, queue=0.5))
    watched.tick()
    trend = watched.recent.trend
    assert trend.requests_per_second == (0.1, 2.0)
    assert trend.waiting == (0.01, 1.0)  # Little: 20 requests of 0.5 s in 10 s
    assert trend.drift == (None, 0.5)
    first, second = trend.p99_seconds
    assert first is not None
    assert second is not None
    assert 0.25 < first <= 0.5
    assert 0.001 < second <= 0.0025
    watched.tick(TICKS + 5)
    assert len(watched.recent.trend.p99_seconds) == TICKS
    assert set(watched.recent.trend.p99_seconds) == {None}


def test_a_model_that_is_new_has_no_points_from_before() -> None:
    watched = Watched()
    watched.tick(5)
    watched.model()
    watched.tick(2)
    assert watched.recent.trend.requests_per_second == (0.0, 0.0)
    assert watched.recent.seconds == 2 * TICK_SECONDS


def test_counters_that_restart_count_neither_twice_nor_negatively() -> None:
    watched = Watched()
    series = watched.model()
    for _ in range(100):
        series.request(answered())
    watched.tick()
    series = watched.model()  # another generation of the model: the same series, from 0
    series.request(answered())
    watched.tick()
    series.request(answered())
    watched.tick()
    assert watched.recent.trend.requests_per_second == (10.0, 0.0, 0.1)
    assert watched.recent.counts.codes == {"OK": 101}
    assert watched.recent.total.codes == {"OK": 2}


def test_a_removed_model_has_no_history() -> None:
    watched = Watched()
    series = watched.model()
    series.request(answered())
    watched.tick()
    watched.metrics.remove(series)
    assert watched.history.read()[0] == {}
    watched.tick()
    watched.model()
    assert watched.recent.counts.codes == {}


def test_current_values_are_those_of_the_gauges() -> None:
    watched = Watched()
    series = watched.model()
    series.queued(3)
    series.in_flight(5)
    series.budget_ratio("y", "relative_l2", float("inf"), 0.0, float("inf"))
    series.budget_ratio("y", "max_abs", float("nan"), 0.0, 0.0)
    recent = watched.recent
    assert (recent.queue_depth, recent.in_flight) == (3, 5)
    assert recent.ratios == {"y": {"relative_l2": 1e9, "max_abs": 1e9}}  # JSON has neither infinity nor NaN
    assert recent.baseline == {"y": {"relative_l2": 1e-3}}


def test_an_unknown_code_counts_as_other() -> None:
    watched = Watched()
    watched.model().request(answered("DATA_LOSS"))
    assert watched.recent.counts.codes == {"other": 1}


def test_rejections_at_the_door_are_counted_by_reason() -> None:
    watched = Watched()
    watched.metrics.refused("in_flight")
    watched.tick(WINDOW_TICKS + 1)
    watched.metrics.refused("bytes")
    door = watched.history.read()[1]
    assert (door.recent, door.total) == ({"bytes": 1}, {"in_flight": 1, "bytes": 1})


class Plain(NamedTuple):
    """A sample received over a pipe."""

    name: str
    labels: Mapping[str, str]
    value: float


def test_the_summed_samples_of_several_workers_are_a_source() -> None:
    labels = {"model": "m", "version": "1"}

    def source() -> Iterable[Plain]:
        yield Plain("bf16kit_requests_total", {**labels, "code": "OK"}, 7.0)
        for bound, count in (("1", 7.0), ("2.5", 7.0), ("5", 7.0), ("10", 7.0), ("+Inf", 7.0)):  # "1", not "1.0"
            yield Plain("bf16kit_request_duration_seconds_bucket", {**labels, "le": bound}, count)
        yield Plain("bf16kit_request_duration_seconds_sum", labels, 3.5)
        yield Plain("process_cpu_seconds_total", {}, 1.0)
        yield Plain("bf16kit_something_new_total", labels, 1.0)

    recent = History(source).read()[0][KEY]
    assert recent.counts.codes == {"OK": 7}
    assert (recent.request.count, recent.request.mean, recent.request.p50) == (7, 0.5, 0.75)


def test_a_read_changes_nothing() -> None:
    watched = Watched()
    series = watched.model()
    series.request(answered())
    watched.tick()
    series.request(answered())
    assert watched.recent == watched.recent


@pytest.mark.parametrize("name", NAMES)
def test_every_name_that_the_history_reads_is_an_existing_sample(name: str) -> None:
    assert name in {sample.name for sample in everything().samples([name])}
