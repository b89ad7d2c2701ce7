"""A model as described to another process."""

from __future__ import annotations

import json

from loopback import LoopbackModel

from service.contract import QueueBounds, Scheduling, StatisticsSnapshot
from service.workers.description import ModelDescription, SummedStatistics, describe

ALIKE = (
    *("name", "version", "inputs", "outputs", "batch_axis", "max_batch_size", "max_queue_delay_s", "instances"),
    *("bounds", "scheduling", "semantics", "info", "golden", "budget"),
)


def test_a_model_description_is_unchanged_by_json() -> None:
    model = LoopbackModel("m")
    model.scheduling = Scheduling(QueueBounds(7), 2, 1, {2: QueueBounds(3)}, (1, 4))
    told = json.loads(json.dumps(describe(model)))
    there = ModelDescription("m", 1, told, SummedStatistics(lambda: StatisticsSnapshot(inference_count=5)))
    for name in ALIKE:
        assert getattr(there, name) == getattr(model, name), name
    assert there.statistics.snapshot().inference_count == 5
