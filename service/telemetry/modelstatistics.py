"""What Triton counts of a model since it was loaded (``ModelStatistics``) and no metric has."""

from __future__ import annotations

import time

from service.contract import BatchStatistics, Duration, StatisticsSnapshot
from service.request import Observation, Timings
from service.telemetry.values import Histogram

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

    def freeze(self) -> tuple[Duration, Duration, Duration]:
        return (
            _duration(self._count, self._gather),
            _duration(self._count, self._run),
            _duration(self._count, self._split),
        )


class ModelStatistics:
    """Counts for :class:`service.telemetry.modelmetrics.ModelMetrics`, which holds its lock meanwhile.

    As in Triton, a batch's duration counts once for each request in it: sum ÷ count is the duration that a request
    experienced.
    """

    def __init__(self) -> None:
        self.weight_bytes = 0
        self._last_inference = 0.0  # seconds since the epoch
        self._inferences = 0
        self._phases = _Phases()
        self._by_size: dict[int, _Phases] = {}
        self._failed, self._failed_seconds = 0, 0.0
        self._failed_waits, self._failed_wait_seconds = 0, 0.0  # of those that had waited for a batch

    def execution(self, requests: int, inferences: int, timings: Timings) -> None:
        """Count a batch that has run. ``inferences`` are its rows, or its requests if the model has no batches."""
        size = inferences if inferences <= _SIZES_APART else 1 << (inferences - 1).bit_length()
        self._last_inference = time.time()
        self._inferences += inferences
        self._phases.add(requests, timings)
        if (same_size := self._by_size.get(size)) is None:
            same_size = self._by_size[size] = _Phases()
        same_size.add(1, timings)

    def failure(self, observation: Observation) -> None:
        """Count a request that was not answered."""
        self._failed += 1
        self._failed_seconds += observation.seconds
        if observation.timings is not None:
            self._failed_waits += 1
            self._failed_wait_seconds += observation.timings.queue

    def snapshot(self, answered: Histogram, waits: Histogram, executions: float) -> StatisticsSnapshot:
        """Return one consistent view, sorted by batch size.

        It is made with the metrics of answered requests and of all waits for a batch. As in Triton, only the waits of
        answered requests are in it.
        """
        gather, run, split = self._phases.freeze()
        return StatisticsSnapshot(
            last_inference_ms=int(self._last_inference * 1e3),
            inference_count=self._inferences,
            execution_count=int(executions),
            success=_duration(answered.count, answered.total),
            fail=_duration(self._failed, self._failed_seconds),
            queue=_duration(waits.count - self._failed_waits, waits.total - self._failed_wait_seconds),
            compute_input=gather,
            compute_infer=run,
            compute_output=split,
            batches=tuple(BatchStatistics(size, *phases.freeze()) for size, phases in sorted(self._by_size.items())),
            weight_bytes=self.weight_bytes,
        )


def _duration(count: float, seconds: float) -> Duration:
    return Duration(int(count), round(seconds * 1e9))
