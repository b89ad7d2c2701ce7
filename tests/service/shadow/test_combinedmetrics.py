"""The metrics of a server with one process, combined with those of the process that measures for it."""

from __future__ import annotations

from concurrent.futures import Future

from bf16kit.numerics.tensors import TensorSpec
from service.peers.channel import Body
from service.peers.peer import Message
from service.shadow.combinedmetrics import CombinedMetrics
from service.telemetry.metrics import Metrics

OUTPUTS = (TensorSpec("y", "float32", ("batch", 2), "embedding"),)
UP = 'bf16kit_drift_reference_up{model="m",version="1"}'
CHANGES = 'bf16kit_drift_changes_total{model="m",output="y",version="1"}'
REQUESTS = 'bf16kit_rows_total{model="m",version="1"}'


def told(metrics: Metrics) -> Message:
    families, complete = metrics.report("bf16kit_drift_")
    return Message({"metrics": [family.as_json() for family in families], "complete": complete})


def test_both_processes_are_shown_as_one_and_a_dead_ones_counts_stay() -> None:
    own, theirs = Metrics(), Metrics()
    mine, measured = own.add("m", 1), theirs.add("m", 1)
    for each in (mine, measured):
        each.opened(1, OUTPUTS)
    asked: list[Future[Body]] = []
    counting = CombinedMetrics(own, lambda: asked[-1] if asked else None, lambda: [("m", 1)])

    def value(series: str) -> float | None:
        lines = counting.expose()[0].decode().splitlines()
        return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{series} ")), None)

    mine.executed(3, 0.1)
    assert (value(REQUESTS), value(UP)) == (3, None), "before there is one"
    measured.reference_up(True)
    measured.changed("y")
    asked.append(Future())
    asked[-1].set_result(dict(told(theirs).body))
    assert (value(REQUESTS), value(UP), value(CHANGES)) == (3, 1, 1)
    names = {series.name for series in counting.samples(["bf16kit_rows_total", "bf16kit_drift_reference_up"])}
    assert names == {"bf16kit_rows_total", "bf16kit_drift_reference_up"}

    asked.clear()
    counting.process_died()
    assert value(UP) is None
    assert value(CHANGES) == 1
    counting.forget("m", [1])
    assert value(CHANGES) == 0
