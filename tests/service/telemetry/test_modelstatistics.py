from __future__ import annotations

import time

from service.contract import Duration
from service.request import Observation, Timings
from service.telemetry.modelstatistics import ModelStatistics


def test_a_new_model_has_zero_counts() -> None:
    seen = ModelStatistics(weight_bytes=7).snapshot()
    assert (seen.inference_count, seen.execution_count, seen.last_inference_ms, seen.weight_bytes) == (0, 0, 0, 7)
    assert seen.success == seen.queue == Duration(0, 0)


def test_a_batch_counts_once_as_an_execution_and_once_per_request_in_the_durations() -> None:
    statistics = ModelStatistics()
    statistics.execution(requests=3, rows=6, timings=Timings(0.0, 0.001, 0.01, 0.002))
    seen = statistics.snapshot()
    assert (seen.inference_count, seen.execution_count) == (6, 1)
    assert seen.compute_input == Duration(3, 3_000_000)
    assert seen.compute_infer == Duration(3, 30_000_000)
    assert seen.compute_output == Duration(3, 6_000_000)
    assert abs(seen.last_inference_ms - time.time() * 1e3) < 60_000


def test_batches_are_counted_by_their_rows_in_ascending_order() -> None:
    statistics = ModelStatistics()
    for rows in (4, 1, 4):
        statistics.execution(1, rows, Timings(compute_infer=0.001))
    batches = statistics.snapshot().batches
    assert [(b.batch_size, b.compute_infer) for b in batches] == [
        (1, Duration(1, 1_000_000)),
        (4, Duration(2, 2_000_000)),
    ]


def test_sizes_of_large_batches_are_rounded_up_to_the_next_power_of_two() -> None:
    statistics = ModelStatistics()
    for rows in range(1, 65_537):
        statistics.execution(1, rows, Timings(compute_infer=0.001))
    batches = {batch.batch_size: batch.compute_infer.count for batch in statistics.snapshot().batches}
    assert list(batches) == [*range(1, 129), 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536]
    assert set(list(batches.values())[:128]) == {1}
    assert [batches[256], batches[512], batches[65_536]] == [128, 256, 32_768]


def test_successes_and_failures_are_counted_with_their_time() -> None:
    statistics = ModelStatistics()
    statistics.request(Observation("m", "1", "", "OK", 0.5, Timings(queue=0.2)))
    statistics.request(Observation("m", "1", "", "INTERNAL", 0.1, Timings(queue=0.3)))
    seen = statistics.snapshot()
    assert seen.success == Duration(1, 500_000_000)
    assert seen.queue == Duration(1, 200_000_000)
    assert seen.fail == Duration(1, 100_000_000)
