"""The counts of all processes of a server together: for ``/metrics``, the status page and ModelStatistics."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from service.contract import BatchStatistics, Duration, StatisticsSnapshot
from service.operations import VersionStatistics
from service.peers.channel import Body, from_json
from service.peers.peer import when_received
from service.telemetry.merged import Family, MergedMetrics, Series, merge
from service.telemetry.metrics import Metrics, expose

# Wait for the processes' current counts; of those that are late, the last report counts.
_TIMEOUT_SECONDS = 2.0
_DURATIONS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
_PHASES = ("compute_input", "compute_infer", "compute_output")
Key = tuple[str, int]  # a model's name and version
Ask = Callable[[], Mapping[str, Future[Body]]]  # returns every other process' answer, by its name


class Counting:
    """Sums the counts of all processes when somebody reads them.

    ``own`` are this process' metrics. ``ask`` requests the counts of the others, which :meth:`receive` receives.
    ``served`` returns the versions that are served. What a dead process had counted until its last report stays, so
    that no counter falls; what it counted after that is lost.
    """

    def __init__(self, own: Metrics, ask: Ask, served: Callable[[], Iterable[Key]]) -> None:
        self._own = own
        self._ask = ask
        self._others = MergedMetrics(lambda: [(name, str(version)) for name, version in served()])
        self._lock = threading.Lock()
        self._latest: dict[str, Mapping[Key, StatisticsSnapshot]] = {}  # of live processes, by name
        self._past: dict[Key, StatisticsSnapshot] = {}  # of dead ones

    def receive(self, process: str, report: Mapping[str, Any]) -> None:
        """Take over what ``process`` has counted so far. Reports must come in the order they were sent."""
        families = map(Family.from_json, report["metrics"])
        self._others.update(process, families, complete=report.get("complete", True))
        if "statistics" in report:
            found: Iterable[VersionStatistics] = from_json(tuple[VersionStatistics, ...], report["statistics"])
            with self._lock:
                self._latest[process] = {(each.name, each.version): each.snapshot for each in found}

    def process_died(self, process: str) -> None:
        """Note that the process died. Its counts are kept."""
        self._others.process_died(process)
        with self._lock:
            for key, seen in self._latest.pop(process, {}).items():
                self._past[key] = add(self._past.get(key, StatisticsSnapshot()), seen)

    def forget(self, model: str, versions: Collection[int]) -> None:
        """Forget the counts of versions that all processes have reloaded or unloaded, which start anew."""
        self._others.forget(model, versions)
        with self._lock:
            for version in versions:
                self._past.pop((model, version), None)

    def expose(self, accept: str = "") -> tuple[bytes, str]:
        """See :meth:`Metrics.expose`; asks for current counts first."""
        self._refresh()
        others = self._others.families()
        return expose(merge(self._own.snapshot(), others), accept) if others else self._own.expose(accept)

    def samples(self, names: Iterable[str]) -> Iterator[Series]:
        """Yield the values of these names; asks for current counts first.

        A series may appear twice if this process and others count it; its value is the sum.
        """
        self._refresh()
        names = list(names)
        own = (Series(each.name, each.labels, each.value) for each in self._own.samples(names))
        return chain(own, self._others.samples(names))

    def statistics(self) -> Mapping[Key, StatisticsSnapshot]:
        """Return the statistics of every version that another process has; asks for current ones first."""
        self._refresh()
        with self._lock:
            total: dict[Key, StatisticsSnapshot] = {}
            for seen in self._latest.values():
                for key, each in seen.items():
                    total[key] = add(total.get(key, self._past.get(key, StatisticsSnapshot())), each)
            return total

    def _refresh(self) -> None:
        """Request every other process' current counts, and wait for them."""
        wait(
            [when_received(answer, partial(self.receive, process)) for process, answer in self._ask().items()],
            _TIMEOUT_SECONDS,
        )


def add(a: StatisticsSnapshot, b: StatisticsSnapshot) -> StatisticsSnapshot:
    """Return the sum of two processes' statistics of a version. Weights are shared, so their size is not added."""
    batches = {each.batch_size: each for each in a.batches}
    for each in b.batches:
        none = BatchStatistics(each.batch_size, Duration(), Duration(), Duration())
        batches[each.batch_size] = _summed(batches.get(each.batch_size, none), each, _PHASES)
    total: StatisticsSnapshot = replace(
        _summed(a, b, _DURATIONS),
        last_inference_ms=max(a.last_inference_ms, b.last_inference_ms),
        inference_count=a.inference_count + b.inference_count,
        execution_count=a.execution_count + b.execution_count,
        batches=tuple(batches[size] for size in sorted(batches)),
        weight_bytes=max(a.weight_bytes, b.weight_bytes),
    )
    return total


def _summed(a: Any, b: Any, durations: Iterable[str]) -> Any:
    """Return ``a`` with the sums of both for these durations."""

    def plus(one: Duration, other: Duration) -> Duration:
        return Duration(one.count + other.count, one.ns + other.ns)

    return replace(a, **{name: plus(getattr(a, name), getattr(b, name)) for name in durations})
