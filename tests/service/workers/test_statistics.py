"""Statistics of models, summed over all workers."""

from __future__ import annotations

import json

from service.contract import BatchStatistics, Duration, StatisticsSnapshot
from service.workers.statistics import MergedStatistics, as_json, from_json


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


def test_statistics_are_unchanged_by_json() -> None:
    told = {("m", 1): did(3, 1, 2), ("m", 2): StatisticsSnapshot()}
    assert from_json(json.loads(json.dumps(as_json(told)))) == told


def test_counts_are_added_per_batch_size_and_shared_weights_count_once() -> None:
    whole = MergedStatistics()
    whole.update("a", {("m", 1): did(3, 1, 4)})
    whole.update("b", {("m", 1): did(5, 2, 4)})
    seen = whole.of("m", 1)
    assert (seen.success, seen.inference_count, seen.execution_count) == (Duration(8, 800), 11, 4)
    assert [(each.batch_size, each.compute_infer.count) for each in seen.batches] == [(1, 1), (2, 1), (4, 2)]
    assert (seen.last_inference_ms, seen.weight_bytes) == (5, 7)


def test_a_dead_workers_counts_are_kept_until_the_model_is_loaded_again() -> None:
    whole = MergedStatistics()
    whole.update("a", {("m", 1): did(3, 1)})
    whole.update("b", {("m", 1): did(5, 1)})
    whole.process_died("a")
    whole.update("a", {("m", 1): did(1, 1)})
    assert whole.of("m", 1).success.count == 9
    whole.forget("m", [1])
    assert whole.of("m", 1).success.count == 6
    whole.update("a", {})
    whole.update("b", {})
    assert whole.sum() == {}
