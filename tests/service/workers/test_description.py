"""A model as described to another process."""

from __future__ import annotations

import json

from loopback import LoopbackModel

from service.contract import QueueBounds, Scheduling, StatisticsSnapshot, TensorSemantics
from service.workers.description import ModelDescription, SummedStatistics, describe

ALIKE = (
    *("name", "version", "inputs", "outputs", "batch_axis", "max_batch_size", "max_queue_delay_s", "instances"),
    *("bounds", "scheduling", "semantics", "info", "golden", "budget"),
)


def test_a_description_leaves_out_labels() -> None:
    """There may be many, each report would have them, and only the process that answers needs them."""
    model = LoopbackModel("m")
    model.semantics = TensorSemantics({"y": ("cat", "dog")})
    told = json.dumps(describe(model))
    assert "cat" not in told
    there = ModelDescription("m", 1, json.loads(told), SummedStatistics(StatisticsSnapshot))
    assert there.semantics == TensorSemantics()


def test_a_model_description_is_unchanged_by_json() -> None:
    model = LoopbackModel("m")
    model.scheduling = Scheduling(QueueBounds(7), (1, 4))
    told = json.loads(json.dumps(describe(model)))
    there = ModelDescription("m", 1, told, SummedStatistics(lambda: StatisticsSnapshot(inference_count=5)))
    for name in ALIKE:
        assert getattr(there, name) == getattr(model, name), name
    assert there.statistics.snapshot().inference_count == 5
