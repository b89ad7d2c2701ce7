"""One model's statistics since it was loaded, counted like Triton's (``ModelStatistics``)."""

from __future__ import annotations

import threading
import time

from service.contract import BatchStatistics, Duration, StatisticsSnapshot
from service.request import Observation, Timings

_SIZES_APART = 128  # rows; larger batches are counted with those up to the next power of two


class _Phases:
    """The three phases of a batch. They are always counted together, so one count is enough."""

    def __init__(self) -> None:
        self._count, self._gather, self._run, self._split = 0, 0.0, 0.0, 0.0

    def add(self, times: int, timings: Timings) -> None:
        self._count += times
        self._gather += timings.compute_input * times
        self._run += timings.compute_infer * times
        self._split += timings.compute_output * times

    def freeze(self) -> dict[str, Duration]:
        return {
            "compute_input": _duration(self._count, self._gather),
            "compute_infer": _duration(self._count, self._run),
            "compute_output": _duration(self._count, self._split),
        }


class ModelStatistics:
    """Counters behind one lock, so that a snapshot never mixes two moments.

    As in Triton, a batch's duration counts once for each request in it: sum ÷ count is the duration that a request
    experienced.
    """

    def __init__(self, weight_bytes: int = 0) -> None:
        self.weight_bytes = weight_bytes
        self._lock = threading.Lock()
        self._last_inference = 0.0  # seconds since the epoch
        self._rows = self._executions = 0
        self._counts = {"success": 0, "fail": 0, "queue": 0}
        self._seconds = {"success": 0.0, "fail": 0.0, "queue": 0.0}
        self._phases = _Phases()
        self._by_size: dict[int, _Phases] = {}

    def execution(self, requests: int, rows: int, timings: Timings) -> None:
        """Count a batch of ``requests`` requests that has run."""
        now, size = time.time(), rows if rows <= _SIZES_APART else 1 << (rows - 1).bit_length()
        with self._lock:
            self._last_inference = now
            self._rows += rows
            self._executions += 1
            self._phases.add(requests, timings)
            if (same_size := self._by_size.get(size)) is None:
                same_size = self._by_size[size] = _Phases()
            same_size.add(1, timings)

    def request(self, observation: Observation) -> None:
        """Count a request that is over. As in Triton, queue time counts for answered requests only."""
        outcome, timings = "success" if observation.succeeded else "fail", observation.timings
        with self._lock:
            self._counts[outcome] += 1
            self._seconds[outcome] += observation.seconds
            if observation.succeeded and timings is not None:
                self._counts["queue"] += 1
                self._seconds["queue"] += timings.queue

    def snapshot(self) -> StatisticsSnapshot:
        """Return one consistent view, sorted by batch size."""
        with self._lock:
            return StatisticsSnapshot(
                last_inference_ms=int(self._last_inference * 1e3),
                inference_count=self._rows,
                execution_count=self._executions,
                **{name: _duration(count, self._seconds[name]) for name, count in self._counts.items()},
                **self._phases.freeze(),
                weight_bytes=self.weight_bytes,
                batches=tuple(
                    BatchStatistics(batch_size=size, **phases.freeze())
                    for size, phases in sorted(self._by_size.items())
                ),
            )


def _duration(count: int, seconds: float) -> Duration:
    return Duration(count, round(seconds * 1e9))
