"""The statistics of models over all workers."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from service.contract import BatchStatistics, Duration, StatisticsSnapshot
from service.workers.view import Key

StatisticsByVersion = Mapping[Key, StatisticsSnapshot]
_DURATIONS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
_PHASES = ("compute_input", "compute_infer", "compute_output")


def as_json(seen: StatisticsByVersion) -> list[list[Any]]:
    """Return one entry per version, for JSON."""
    return [[name, version, asdict(each)] for (name, version), each in seen.items()]


def from_json(fields: Iterable[Any]) -> StatisticsByVersion:
    """Parse :func:`as_json`'s output."""
    return {(name, version): _snapshot(each) for name, version, each in fields}


def add(a: StatisticsSnapshot, b: StatisticsSnapshot) -> StatisticsSnapshot:
    """Return the sum of two workers' statistics of a version. Weights are shared, so their size is not added."""
    batches = {each.batch_size: each for each in a.batches}
    for each in b.batches:
        known = batches.get(each.batch_size)
        batches[each.batch_size] = each if known is None else _add_batches(known, each)
    return StatisticsSnapshot(
        last_inference_ms=max(a.last_inference_ms, b.last_inference_ms),
        inference_count=a.inference_count + b.inference_count,
        execution_count=a.execution_count + b.execution_count,
        **{name: _add(getattr(a, name), getattr(b, name)) for name in _DURATIONS},
        batches=tuple(batches[size] for size in sorted(batches)),
        weight_bytes=max(a.weight_bytes, b.weight_bytes),
    )


class MergedStatistics:
    """Sums workers' statistics: the newest report of each live worker, and the last report of each dead one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest: dict[str, StatisticsByVersion] = {}
        self._kept: dict[Key, StatisticsSnapshot] = {}

    def update(self, process: str, seen: StatisticsByVersion) -> None:
        """Take over the statistics of ``process``."""
        with self._lock:
            self._latest[process] = seen

    def process_died(self, process: str) -> None:
        """Note that the process died. Its statistics are kept."""
        with self._lock:
            for key, seen in self._latest.pop(process, {}).items():
                self._kept[key] = add(self._kept.get(key, StatisticsSnapshot()), seen)

    def forget(self, model: str, versions: Collection[int]) -> None:
        """Drop kept statistics of versions that were reloaded, which start anew."""
        with self._lock:
            for version in versions:
                self._kept.pop((model, version), None)

    def sum(self) -> StatisticsByVersion:
        """Return the sum for every version that a worker has."""
        with self._lock:
            total: dict[Key, StatisticsSnapshot] = {}
            for seen in self._latest.values():
                for key, each in seen.items():
                    total[key] = add(total.get(key, self._kept.get(key, StatisticsSnapshot())), each)
            return total

    def of(self, name: str, version: int) -> StatisticsSnapshot:
        key = name, version
        with self._lock:
            total = self._kept.get(key, StatisticsSnapshot())
            for each in (seen[key] for seen in self._latest.values() if key in seen):
                total = add(total, each)
            return total


def _add(a: Duration, b: Duration) -> Duration:
    return Duration(a.count + b.count, a.ns + b.ns)


def _add_batches(a: BatchStatistics, b: BatchStatistics) -> BatchStatistics:
    return BatchStatistics(a.batch_size, *(_add(getattr(a, name), getattr(b, name)) for name in _PHASES))


def _snapshot(fields: Mapping[str, Any]) -> StatisticsSnapshot:
    batches = tuple(
        BatchStatistics(each["batch_size"], *(Duration(**each[name]) for name in _PHASES)) for each in fields["batches"]
    )
    durations = {name: Duration(**fields[name]) for name in _DURATIONS}
    return StatisticsSnapshot(**{**fields, **durations, "batches": batches})
