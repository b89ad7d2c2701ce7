"""What one model has done since it was loaded, counted the way Triton counts (``ModelStatistics``)."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from service.contract import BatchStatistics, Duration, StatisticsSnapshot


@dataclass(slots=True)
class _Tally:
    count: int = 0
    ns: int = 0

    def add(self, seconds: float, times: int = 1) -> None:
        self.count += times
        self.ns += int(seconds * 1e9) * times

    def freeze(self) -> Duration:
        return Duration(self.count, self.ns)


@dataclass(slots=True)
class _Phases:
    compute_input: _Tally = field(default_factory=_Tally)
    compute_infer: _Tally = field(default_factory=_Tally)
    compute_output: _Tally = field(default_factory=_Tally)

    def add(self, gather_s: float, run_s: float, split_s: float, times: int = 1) -> None:
        self.compute_input.add(gather_s, times)
        self.compute_infer.add(run_s, times)
        self.compute_output.add(split_s, times)


class ModelStatistics:
    """Counters behind one lock, so that a snapshot never mixes two moments.

    A batch's duration counts once for each request in it, as in Triton: sum over count is what a request saw.
    """

    def __init__(self, weight_bytes: int = 0) -> None:
        self.weight_bytes = weight_bytes
        self._lock = threading.Lock()
        self._last_inference_ms = 0
        self._rows = 0
        self._executions = 0
        self._success, self._fail, self._queue = _Tally(), _Tally(), _Tally()
        self._phases = _Phases()
        self._by_size: dict[int, _Phases] = {}

    def execution(self, requests: int, rows: int, gather_s: float, run_s: float, split_s: float) -> None:
        """One batch of ``requests`` requests has run: seconds to gather its inputs, to run it, to split its outputs."""
        now_ms = time.time_ns() // 1_000_000
        with self._lock:
            self._last_inference_ms = now_ms
            self._rows += rows
            self._executions += 1
            self._phases.add(gather_s, run_s, split_s, requests)
            self._by_size.setdefault(rows, _Phases()).add(gather_s, run_s, split_s)

    def success(self, total_s: float, queue_s: float) -> None:
        """One request was answered after ``total_s``, of which it queued ``queue_s``."""
        with self._lock:
            self._success.add(total_s)
            self._queue.add(queue_s)

    def failure(self, total_s: float) -> None:
        """One request was refused or failed after ``total_s``."""
        with self._lock:
            self._fail.add(total_s)

    def snapshot(self) -> StatisticsSnapshot:
        """One consistent view, by batch size ascending."""
        with self._lock:
            return StatisticsSnapshot(
                last_inference_ms=self._last_inference_ms,
                inference_count=self._rows,
                execution_count=self._executions,
                success=self._success.freeze(),
                fail=self._fail.freeze(),
                queue=self._queue.freeze(),
                compute_input=self._phases.compute_input.freeze(),
                compute_infer=self._phases.compute_infer.freeze(),
                compute_output=self._phases.compute_output.freeze(),
                batches=tuple(_freeze(size, phases) for size, phases in sorted(self._by_size.items())),
                weight_bytes=self.weight_bytes,
            )


def _freeze(size: int, phases: _Phases) -> BatchStatistics:
    return BatchStatistics(
        batch_size=size,
        compute_input=phases.compute_input.freeze(),
        compute_infer=phases.compute_infer.freeze(),
        compute_output=phases.compute_output.freeze(),
    )
