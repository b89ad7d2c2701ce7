"""The ``/metrics`` page of a server that exposes every series that there can be."""

from functools import cache

from bf16kit.drift.budget import Budget
from bf16kit.drift.metrics import SampleDrift
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import RuntimeInfo
from bf16kit.service.telemetry.families import CAUSES
from bf16kit.service.telemetry.metrics import Metrics


def everything_exposed() -> str:
    """Return every series that there can be, in the text format of ``/metrics``."""
    return everything().expose()[0].decode()


@cache
def everything() -> Metrics:
    """Return metrics with every series, for one model with one output ``y`` of logits and one input ``x``."""
    metrics = Metrics()
    model = metrics.add("m", 1)
    model.opened(1, [TensorSpec("y", "float32", ("batch", 4), "logits")])
    model.loaded(
        RuntimeInfo("onnxruntime", "cpu", "cpu", "bf16-weights", "fp32"),
        {"y": {"relative_l2": 0.001}},
        Budget().as_dict(),
    )
    model.drift("y", SampleDrift(1e-3, 1e-6, 1e-3, 60.0, 1, 1, 0), 1.0)
    model.budget_ratio("y", "relative_l2", 0.4, 0.3, 0.5)
    model.budget_ratio("y", "slice_error", 0.1, 0.05, 0.2)
    model.recent("y", 100.0, 0.1)
    model.worst_slice("y", 1, 3)
    model.changed("y")
    model.out_of_range("x", 1)
    model.judged("within", CAUSES[0])
    model.last_sample(1.0)
    model.reference_up(True)
    model.gate("passed", 1.0)
    return metrics
