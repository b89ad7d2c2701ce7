"""One model's statistics since it was loaded, counted like Triton's (``ModelStatistics``)."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from operator import itemgetter

from service.contract import BatchStatistics, Duration, StatisticsSnapshot
from service.request import Observation, Timings

_SIZES_APART = 128  # rows; larger batches are counted with those up to the next power of two


@dataclass(slots=True)
class _Tally:
    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds

    def freeze(self) -> Duration:
        return _duration(self.count, self.seconds)


@dataclass(slots=True)
class _Phases:
    """The three phases of a batch. They are always counted together, so one count is enough."""

    count: int = 0
    gather: float = 0.0
    run: float = 0.0
    split: float = 0.0

    def add(self, times: int, timings: Timings) -> None:
        self.count += times
        self.gather += timings.compute_input * times
        self.run += timings.compute_infer * times
        self.split += timings.compute_output * times


class ModelStatistics:
    """Counters behind one lock, so that a snapshot never mixes two moments.

    As in Triton, a batch's duration counts once for each request in it: sum ÷ count is the duration that a request
    experienced.
    """

    def __init__(self, weight_bytes: int = 0) -> None:
        self.weight_bytes = weight_bytes
        self._lock = threading.Lock()
        self._last_inference = 0.0  # seconds since the epoch
        self._rows = 0
        self._executions = 0
        self._success, self._fail, self._queue = _Tally(), _Tally(), _Tally()
        self._phases = _Phases()
        self._by_size: dict[int, _Phases] = {}

    def execution(self, requests: int, rows: int, timings: Timings) -> None:
        """Count a batch of ``requests`` requests that has run."""
        now, size = time.time(), _size_bucket(rows)
        with self._lock:
            self._last_inference = now
            self._rows += rows
            self._executions += 1
            self._phases.add(requests, timings)
            same_size = self._by_size.get(size)
            if same_size is None:
                same_size = self._by_size[size] = _Phases()
            same_size.add(1, timings)

    def request(self, observation: Observation) -> None:
        """Count a request that is over. As in Triton, queue time counts for answered requests only."""
        with self._lock:
            if not observation.succeeded:
                self._fail.add(observation.seconds)
                return
            self._success.add(observation.seconds)
            if observation.timings is not None:
                self._queue.add(observation.timings.queue)

    def snapshot(self) -> StatisticsSnapshot:
        """Return one consistent view, sorted by batch size. Requests wait only while the counters are copied."""
        with self._lock:
            totals = StatisticsSnapshot(
                last_inference_ms=int(self._last_inference * 1e3),
                inference_count=self._rows,
                execution_count=self._executions,
                success=self._success.freeze(),
                fail=self._fail.freeze(),
                queue=self._queue.freeze(),
                compute_input=_duration(self._phases.count, self._phases.gather),
                compute_infer=_duration(self._phases.count, self._phases.run),
                compute_output=_duration(self._phases.count, self._phases.split),
                weight_bytes=self.weight_bytes,
            )
            by_size = [(size, replace(phases)) for size, phases in self._by_size.items()]
        by_size.sort(key=itemgetter(0))
        return replace(totals, batches=tuple(_freeze(size, phases) for size, phases in by_size))


def _size_bucket(rows: int) -> int:
    return rows if rows <= _SIZES_APART else 1 << (rows - 1).bit_length()


def _duration(count: int, seconds: float) -> Duration:
    return Duration(count, round(seconds * 1e9))


def _freeze(size: int, phases: _Phases) -> BatchStatistics:
    return BatchStatistics(
        batch_size=size,
        compute_input=_duration(phases.count, phases.gather),
        compute_infer=_duration(phases.count, phases.run),
        compute_output=_duration(phases.count, phases.split),
    )
