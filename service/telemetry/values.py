"""What a process counts, as plain values that processes can send to each other and add up. Knows no library.

A value has the key of its series: the metric's name, as in :mod:`bf16kit.service.telemetry.families`, then the values
of its labels. The statistics of a model's version are a value too, with the name :data:`STATISTICS`, which is no
metric.
"""

from __future__ import annotations

import bisect
import math
import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Self, TypeAlias, cast

from bf16kit.service.contract import BatchStatistics, Duration, StatisticsSnapshot
from bf16kit.service.peers.channel import from_json, to_json
from bf16kit.service.request import Observation, Timings
from bf16kit.service.telemetry.families import METRICS, OF_MODEL, Mode

STATISTICS = "statistics"
_SIZES_APART = 128  # rows; larger batches are counted with those up to the next power of two
Key = tuple[str, ...]
_COMBINE: Mapping[Mode, Callable[[Any, Any], Any]] = {"sum": operator.add, "min": min, "max": max}
# How to combine those gauges of a process itself that are not summed. All others are: a server's memory, for example,
# is the sum over its processes.
_PROCESS_MODES: Mapping[str, Mode] = {
    "process_start_time_seconds": "min",
    "process_max_fds": "min",
    "python_info": "max",
}


class Exemplar(NamedTuple):
    """A single observation, in a trace, that a histogram's bucket points to."""

    trace: str
    value: float
    timestamp: float


class Histogram:
    """A histogram of weighted observations: each counts as the number of rows that it stands for.

    A sample taken with probability p stands for 1 ÷ p rows (Horvitz and Thompson, J. Am. Stat. Assoc. 47, 1952). The
    histogram thus estimates the distribution over all answered rows, however unevenly they were sampled.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds  # the last bucket, without a bound, comes after them
        self.weights = [0.0] * (len(bounds) + 1)
        self.total = 0.0
        self.exemplars: dict[int, Exemplar] = {}  # by the number of their bucket

    def observe(self, amount: float, weight: float = 1.0, trace: str = "") -> None:
        """Observe ``amount``, at least 0, with ``weight`` rows, which may be a fraction, in a trace with this id."""
        at = bisect.bisect_left(self._bounds, amount)
        self.weights[at] += weight
        self.total += amount * weight
        if trace:
            self.exemplars[at] = Exemplar(trace, amount, time.time())

    @property
    def count(self) -> float:
        """The number of rows."""
        return sum(self.weights)

    def counts(self) -> list[float]:
        """Return the cumulative counts of the buckets. OpenMetrics requires whole ones.

        Each is rounded only here, so it is off by at most half a row and never falls.
        """
        return [float(math.floor(below + 0.5)) for below in accumulate(self.weights)]

    def __add__(self, other: Histogram) -> Self:
        """Return the sum of two processes' histograms. A bucket has the newest of its exemplars."""
        total = type(self)(self._bounds)
        total.weights = list(map(operator.add, self.weights, other.weights))
        total.total = self.total + other.total
        by_time = sorted((*self.exemplars.items(), *other.exemplars.items()), key=lambda each: each[1].timestamp)
        total.exemplars = dict(by_time)
        return total

    def copy(self) -> Histogram:
        return self + Histogram(self._bounds)


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
    """What Triton counts of a model since it was loaded, and no metric has. The caller holds a lock.

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


Value: TypeAlias = float | Histogram | StatisticsSnapshot
Values: TypeAlias = dict[Key, Value]


def model_of(key: Key) -> tuple[str, str] | None:
    """Return the model and the version that a value belongs to, if any."""
    return (key[1], key[2]) if key[0] in OF_MODEL or key[0] == STATISTICS else None


def fell(before: Values, now: Values) -> Values:
    """Return those values of ``before`` that only grow, and that are smaller ``now``, or missing."""
    return {
        key: value
        for key, value in before.items()
        if _only_grows(key[0]) and _amount(now.get(key, 0.0)) < _amount(value)
    }


def merge(many: Iterable[Values]) -> Values:
    """Return several processes' values as one server's, in the order given: sums, but of some gauges the extreme."""
    merged: Values = {}
    for values in many:
        for key, value in values.items():
            merged[key] = _combine(key[0])(merged[key], value) if key in merged else value
    return merged


def to_message(values: Values) -> list[Any]:
    """Return the values as JSON, for :func:`from_message`."""
    return [[key, _written(value)] for key, value in values.items()]


def from_message(written: Iterable[Any]) -> Values:
    """Return the values that :func:`to_message` wrote."""
    return {tuple(key): _read(key[0], value) for key, value in written}


def _only_grows(name: str) -> bool:
    if name in METRICS:
        return METRICS[name].kind != "gauge"
    return name == STATISTICS or name.endswith("_total")


def _amount(value: Value) -> float:
    """Return what grows with each event that a value counts."""
    if isinstance(value, Histogram):
        return value.count
    if isinstance(value, StatisticsSnapshot):
        return value.execution_count + value.success.count + value.fail.count
    return value


def _combine(name: str) -> Callable[[Any, Any], Value]:
    return _COMBINE[METRICS[name].mode if name in METRICS else _PROCESS_MODES.get(name, "sum")]


def _written(value: Value) -> Any:
    if isinstance(value, Histogram):
        return [value.weights, value.total, list(value.exemplars.items())]
    return to_json(value) if isinstance(value, StatisticsSnapshot) else value


def _read(name: str, written: Any) -> Value:
    if name == STATISTICS:
        return cast("StatisticsSnapshot", from_json(StatisticsSnapshot, written))
    if not isinstance(written, list):
        return float(written)
    histogram = Histogram(METRICS[name].buckets)
    histogram.weights, histogram.total, exemplars = written
    histogram.exemplars = {at: Exemplar(*each) for at, each in exemplars}
    return histogram


def _duration(count: float, seconds: float) -> Duration:
    return Duration(int(count), round(seconds * 1e9))
