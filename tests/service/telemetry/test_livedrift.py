from __future__ import annotations

import math

import pytest
from exposed import everything

from bf16kit.numerics.tensors import TensorSpec
from service.telemetry.history import History, RecentActivity
from service.telemetry.livedrift import LiveDrift
from service.telemetry.metrics import Metrics
from service.telemetry.modelmetrics import ModelMetrics
from service.telemetry.readings import NAMES

NOTHING = LiveDrift.of({})


class Watched:
    """The metrics of one model, and their history; the test sets ``wall``."""

    def __init__(self) -> None:
        self.metrics, self.wall = Metrics(), 100.0
        self.history = History(lambda: self.metrics.samples(NAMES), lambda: 0.0, lambda: self.wall)

    def model(self) -> ModelMetrics:
        series = self.metrics.add("m", 1)
        series.opened(1, [TensorSpec("y", "float32", ("batch", 4))])
        return series

    @property
    def recent(self) -> RecentActivity:
        return self.history.read()[0]["m", "1"]

    @property
    def drift(self) -> LiveDrift:
        return self.recent.drift


def test_a_new_model_has_no_known_drift() -> None:
    watched = Watched()
    watched.model()
    drift = watched.drift
    assert (drift.over, drift.cause, drift.changes, drift.fallbacks, drift.fallback) == (False, "", 0, 0, False)
    assert (drift.reference_up, drift.gate_passed, drift.gate_at, drift.last_sample) == (None, None, None, None)
    assert (dict(drift.low), dict(drift.change_score), dict(drift.out_of_range)) == ({}, {}, {})
    assert drift.answers == {"bf16": 0, "fp32": 0}
    assert NOTHING.answers == {}


def test_live_drift_reads_every_field_from_the_metrics() -> None:
    watched = Watched()
    series = watched.model()
    series.budget_ratio("y", "relative_l2", 1.3, 1.1, 1.5)
    series.recent("y", 42.5, 1.2)
    series.worst_slice("y", 2, 17)
    series.changed("y")
    series.judged("over", "out_of_range")
    series.out_of_range("x", 7)
    series.out_of_range("z", 0)
    series.last_sample(99.0)
    series.reference_up(False)
    series.gate("failed", 98.0)
    series.answered("fp32")
    drift = watched.drift
    assert (drift.low["y"]["relative_l2"], drift.high["y"]["relative_l2"]) == (1.1, 1.5)
    assert (drift.effective_samples, drift.change_score, drift.changes) == ({"y": 42.5}, {"y": 1.2}, 1)
    assert drift.worst_slice == {"y": (2, 17)}
    assert (drift.over, drift.cause, drift.out_of_range) == (True, "out_of_range", {"x": 7})
    assert (drift.last_sample, drift.reference_up, drift.gate_passed, drift.gate_at) == (99.0, False, False, 98.0)
    assert drift.answers == {"bf16": 0, "fp32": 1}


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_an_infinite_or_nan_value_is_read_as_none(value: float) -> None:
    watched = Watched()
    series = watched.model()
    series.budget_ratio("y", "relative_l2", 0.3, 0.0, value)
    series.recent("y", 1.0, value)
    assert (watched.drift.high["y"]["relative_l2"], watched.drift.change_score["y"]) == (None, None)


def test_the_start_of_the_fallback_is_known_to_a_tick() -> None:
    watched = Watched()
    series = watched.model()
    watched.history.tick()
    series.fallback(True)
    series.transition("fp32")
    watched.wall = 150.0
    watched.history.tick()
    watched.wall = 190.0
    watched.history.tick()
    assert (watched.drift.fallback, watched.drift.fallback_since, watched.drift.fallbacks) == (True, 150.0, 1)
    series.fallback(False)
    watched.wall = 200.0
    assert (watched.drift.fallback, watched.drift.fallback_since) == (False, 200.0), "a look is as good as a tick"


def test_a_model_that_falls_back_from_the_first_tick_has_no_known_start() -> None:
    watched = Watched()
    watched.model().fallback(True)
    watched.history.tick()
    watched.history.tick()
    assert (watched.drift.fallback, watched.drift.fallback_since) == (True, None)


def test_every_drift_series_is_read_by_its_labels() -> None:
    history = History(lambda: everything().samples(NAMES))
    drift = history.read()[0]["m", "1"].drift
    assert drift.reference_up is True
    assert (drift.gate_passed, drift.changes) == (True, 1)
