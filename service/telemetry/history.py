"""The last quarter of an hour of each model, from metrics only, so that it costs a request nothing.

A tick reads the counters and stores by how much each has grown. This works for several processes as well, with the sum
of their metrics as the source.

Memory is bounded: a model takes :data:`TICKS` rows of :data:`COLUMNS` numbers of four bytes, 28 kB.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from service.request import REFUSALS
from service.telemetry import families as vocabulary
from service.telemetry.livedrift import ACTIVE, LiveDrift
from service.telemetry.quantiles import Durations, durations, quantiles
from service.telemetry.readings import (
    BASELINE,
    CODES,
    DEPTH,
    HISTOGRAMS,
    IN_FLIGHT,
    LAYOUT,
    RATIO,
    Key,
    Reading,
    Source,
    Totals,
)
from service.telemetry.readings import NAMES as NAMES

TICK_SECONDS = 10.0
TICKS = 90  # a quarter of an hour
WINDOW_TICKS = 30  # five minutes, the window of counts and percentiles

COLUMNS = LAYOUT.size + 1  # the last is the highest drift ÷ budget: a value, not a count
Rows = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of requests, batches and drift samples. ``codes`` and ``rejected`` hold no zeros."""

    codes: Mapping[str, int]
    rejected: Mapping[str, int]
    samples: Mapping[str, int]  # live drift samples, by outcome
    rows: int
    batches: int

    @property
    def answered(self) -> int:
        return self.codes.get("OK", 0)

    @property
    def failed(self) -> int:
        return sum(self.codes.values()) - self.answered


@dataclass(frozen=True, slots=True)
class Trend:
    """One number per tick, the oldest first; None for a tick without a value."""

    requests_per_second: tuple[float | None, ...] = ()
    p99_seconds: tuple[float | None, ...] = ()
    # Mean number of requests in the queue (Little's law: their total wait ÷ the time).
    waiting: tuple[float | None, ...] = ()
    drift: tuple[float | None, ...] = ()  # the highest drift ÷ budget


@dataclass(frozen=True, slots=True)
class RecentActivity:
    """One model over the last :attr:`seconds`, at most five minutes. ``total`` counts since it was loaded."""

    seconds: float
    counts: Counts
    total: Counts
    request: Durations
    queue: Durations
    compute: Durations  # of batches
    queue_depth: int
    in_flight: int
    ratios: Mapping[str, Mapping[str, float]]  # recent drift ÷ budget, by output and metric
    baseline: Mapping[str, Mapping[str, float]]
    drift: LiveDrift
    trend: Trend

    def per_second(self, count: int) -> float:
        return count / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class EarlyRejections:
    """Requests rejected before they reached a model, by reason, without zeros."""

    recent: Mapping[str, int]
    total: Mapping[str, int]


class _CounterHistory:
    """The growth of one owner's counters per tick, the newest last; NaN for ticks before the owner existed."""

    def __init__(self, size: int, totals: Totals) -> None:
        self.before = np.zeros_like(totals)
        self.rows: Rows = np.full((TICKS, size), np.nan, np.float32)
        self.fallback: bool | None = None  # None: not read yet
        self.fallback_since: float | None = None

    def growth(self, totals: Totals) -> Totals:
        """Return the growth since the last tick; 0 if any counter fell: it restarted, and the growth before that is
        unknown."""
        grown = totals - self.before
        return np.zeros_like(grown) if (grown < 0).any() else grown

    def append(self, totals: Totals, value: float = np.nan) -> None:
        self.rows[:-1] = self.rows[1:]
        self.rows[-1, : len(totals)] = self.growth(totals)
        self.rows[-1, len(totals) :] = value
        self.before = totals

    def precision(self, fallback: bool, now: float) -> None:
        """Note which precision answers. The time of a change is accurate to one tick, or to the last call."""
        if self.fallback not in (None, fallback):
            self.fallback_since = now
        self.fallback = fallback

    def window(self, totals: Totals) -> Totals:
        """Return the growth over the last :data:`WINDOW_TICKS` ticks and the time since."""
        past: Totals = np.nansum(self.rows[-WINDOW_TICKS:, : len(totals)], axis=0, dtype=np.float64)
        return past + self.growth(totals)


class History:
    """Keeps the history. A thread calls :meth:`tick` every :data:`TICK_SECONDS`; any thread may call :meth:`read`.

    ``clock`` measures durations, in seconds. ``wall`` returns Unix seconds, for times that are shown.
    """

    def __init__(
        self, source: Source, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> None:
        self._source = source
        self._clock = clock
        self._wall = wall
        self._lock = threading.Lock()
        self._at = clock()
        self._lengths: deque[float] = deque([0.0] * TICKS, TICKS)  # lengths of the ticks, in seconds
        self._models: dict[Key, _CounterHistory] = {}
        self._early_rejections = _CounterHistory(len(REFUSALS), np.zeros(len(REFUSALS)))

    def tick(self) -> None:
        """Store the growth since the last tick. Models that no longer exist are dropped."""
        with self._lock:
            read, now = Reading(self._source()), self._clock()
            self._lengths.append(now - self._at)
            self._at = now
            self._early_rejections.append(read.refused)
            tracks = {key: self._track(key, totals) for key, totals in read.totals.items()}
            for key, track in tracks.items():
                track.append(read.totals[key], read.ratio(key))
                track.precision(_falls_back(read, key), self._wall())
            self._models = tracks

    def read(self) -> tuple[dict[Key, RecentActivity], EarlyRejections]:
        """Return the recent activity of every model, by name and version, and the rejections before a model was
        reached."""
        with self._lock:
            read, since = Reading(self._source()), self._clock() - self._at
            models = {key: self._recent(key, totals, read, since) for key, totals in read.totals.items()}
            rejections = EarlyRejections(
                _named(REFUSALS, self._early_rejections.window(read.refused)), _named(REFUSALS, read.refused)
            )
        return models, rejections

    def _track(self, key: Key, totals: Totals) -> _CounterHistory:
        return self._models.get(key) or _CounterHistory(COLUMNS, totals)

    def _recent(self, key: Key, totals: Totals, read: Reading, since: float) -> RecentActivity:
        track = self._track(key, totals)
        window = track.window(totals)
        recorded = ~np.isnan(track.rows[:, 0])
        lengths = np.array(self._lengths)
        drift, gauges = read.drift.get(key, {}), read.gauges.get(key, {})
        track.precision(_falls_back(read, key), self._wall())
        request, queue, compute = (_durations(window, name) for name in HISTOGRAMS)
        return RecentActivity(
            seconds=float(lengths[-WINDOW_TICKS:][recorded[-WINDOW_TICKS:]].sum() + since),
            counts=_counts(window),
            total=_counts(totals),
            request=request,
            queue=queue,
            compute=compute,
            queue_depth=gauges.get(DEPTH, 0),
            in_flight=gauges.get(IN_FLIGHT, 0),
            ratios=drift.get(RATIO, {}),
            baseline=drift.get(BASELINE, {}),
            drift=LiveDrift.of(read.live.get(key, {}), track.fallback_since),
            trend=_trend(track.rows[recorded], lengths[recorded]),
        )


def _falls_back(read: Reading, key: Key) -> bool:
    return read.live.get(key, {}).get(ACTIVE, {}).get(()) == 1


def _counts(totals: Totals) -> Counts:
    part = LAYOUT.parts
    return Counts(
        codes=_named(CODES, totals[part["bf16kit_requests_total"]]),
        rejected=_named(vocabulary.REJECTIONS, totals[part["bf16kit_rejected_total"]]),
        samples=_named(vocabulary.OUTCOMES, totals[part["bf16kit_drift_samples_total"]]),
        rows=int(totals[part["bf16kit_rows_total"]].sum()),
        batches=int(totals[part["bf16kit_executions_total"]].sum()),
    )


def _named(names: Sequence[str], counts: Totals) -> dict[str, int]:
    return {name: int(count) for name, count in zip(names, counts, strict=True) if count}


def _durations(totals: Totals, name: str) -> Durations:
    return durations(
        vocabulary.SECONDS, totals[LAYOUT.parts[f"{name}_bucket"]], float(totals[LAYOUT.parts[f"{name}_sum"]].sum())
    )


def _trend(rows: Rows, lengths: Totals) -> Trend:
    """Return the trend. ``rows`` are the ticks in which the model existed, ``lengths`` their seconds."""
    if not len(rows):
        return Trend()
    request, queue, _ = HISTOGRAMS
    part, lengths = LAYOUT.parts, np.maximum(lengths, 1e-3)
    requests = rows[:, part["bf16kit_requests_total"]].sum(axis=1) / lengths
    waiting = rows[:, part[f"{queue}_sum"]].sum(axis=1) / lengths
    p99 = quantiles(vocabulary.SECONDS, rows[:, part[f"{request}_bucket"]].astype(np.float64), 0.99)
    return Trend(_rounded(requests), _rounded(p99), _rounded(waiting), _rounded(rows[:, -1].astype(np.float64)))


def _rounded(values: Totals) -> tuple[float | None, ...]:
    """Round to four digits, more than a chart can show."""
    return tuple(None if value != value else float(f"{value:.4g}") for value in values.tolist())
