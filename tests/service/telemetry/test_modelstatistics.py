from __future__ import annotations

import time

import pytest

from service.contract import Duration, StatisticsSnapshot
from service.request import Observation, Timings
from service.telemetry.modelmetrics import ModelMetrics


@pytest.fixture
def model() -> ModelMetrics:
    return ModelMetrics("m", 1)


def test_a_new_model_has_zero_counts(model: ModelMetrics) -> None:
    model.opened(7, [])
    assert model.statistics == StatisticsSnapshot(weight_bytes=7)


def test_a_batch_counts_once_as_an_execution_and_once_per_request_in_the_durations(model: ModelMetrics) -> None:
    model.executed(3, 6, Timings(0.0, 0.001, 0.01, 0.002))
    seen = model.statistics
    assert (seen.inference_count, seen.execution_count) == (6, 1)
    assert seen.compute_input == Duration(3, 3_000_000)
    assert seen.compute_infer == Duration(3, 30_000_000)
    assert seen.compute_output == Duration(3, 6_000_000)
    assert abs(seen.last_inference_ms - time.time() * 1e3) < 60_000


def test_batches_are_counted_by_their_rows_in_ascending_order(model: ModelMetrics) -> None:
    for rows in (4, 1, 4):
        model.executed(1, rows, Timings(compute_infer=0.001))
    assert [(each.batch_size, each.compute_infer) for each in model.statistics.batches] == [
        (1, Duration(1, 1_000_000)),
        (4, Duration(2, 2_000_000)),
    ]


def test_sizes_of_large_batches_are_rounded_up_to_the_next_power_of_two(model: ModelMetrics) -> None:
    for rows in range(1, 65_537):
        model.executed(1, rows, Timings(compute_infer=0.001))
    batches = {batch.batch_size: batch.compute_infer.count for batch in model.statistics.batches}
    assert list(batches) == [*range(1, 129), 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536]
    assert set(list(batches.values())[:128]) == {1}
    assert [batches[256], batches[512], batches[65_536]] == [128, 256, 32_768]


def test_successes_and_failures_are_counted_with_their_time_and_only_successes_with_their_wait(
    model: ModelMetrics,
) -> None:
    model.request(Observation("m", "1", "", "OK", 0.5, Timings(queue=0.2)))
    model.request(Observation("m", "1", "", "OK", 0.5))
    model.request(Observation("m", "1", "", "INTERNAL", 0.1, Timings(queue=0.3)))
    model.request(Observation("m", "1", "", "UNAVAILABLE", 0.1))
    seen = model.statistics
    assert seen.success == Duration(2, 1_000_000_000)
    assert seen.queue == Duration(1, 200_000_000)
    assert seen.fail == Duration(2, 200_000_000)
