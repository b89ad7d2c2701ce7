"""What each model did in the last quarter of an hour, from metrics alone: nobody who answers a request pays for it.

A tick reads the counters and keeps what each has grown by. That is all there is to know about several processes, too:
whoever adds up their metrics has the same samples to give.

Bounded: a model takes :data:`TICKS` rows of :data:`COLUMNS` numbers of four bytes, 28 kB.
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
from service.telemetry import vocabulary as words
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
WINDOW_TICKS = 30  # five minutes, which counts and percentiles are taken over

COLUMNS = LAYOUT.size + 1  # the last is the highest ratio of drift to its budget: a value, no count
Rows = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Counts:
    """Requests, batches and drift samples: how many. ``codes`` and ``rejected`` hold none that are 0."""

    codes: Mapping[str, int]
    rejected: Mapping[str, int]
    samples: Mapping[str, int]  # of live drift, by outcome
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
    """One number per tick, the oldest first; None where a tick had none to tell."""

    requests_per_second: tuple[float | None, ...] = ()
    p99_seconds: tuple[float | None, ...] = ()
    waiting: tuple[float | None, ...] = ()  # requests in the queue, on average (Little: what they waited ÷ the time)
    drift: tuple[float | None, ...] = ()  # the highest ratio to the budget


@dataclass(frozen=True, slots=True)
class Recent:
    """One model over the last :attr:`seconds`, at most five minutes; ``total`` is since it was loaded."""

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
class Door:
    """What was refused before a model was asked, by reason, none of them 0."""

    recent: Mapping[str, int]
    total: Mapping[str, int]


class _Track:
    """How counters of one owner grew, tick by tick, the newest last; NaN before it was there."""

    def __init__(self, size: int, totals: Totals) -> None:
        self.before = np.zeros_like(totals)
        self.rows: Rows = np.full((TICKS, size), np.nan, np.float32)
        self.fallback: bool | None = None  # None: not looked at yet
        self.fallback_since: float | None = None

    def growth(self, totals: Totals) -> Totals:
        """Since the last tick. Nothing where a counter went back: it began anew, and what it lost is not known."""
        grown = totals - self.before
        return np.zeros_like(grown) if (grown < 0).any() else grown

    def append(self, totals: Totals, value: float = np.nan) -> None:
        self.rows[:-1] = self.rows[1:]
        self.rows[-1, : len(totals)] = self.growth(totals)
        self.rows[-1, len(totals) :] = value
        self.before = totals

    def precision(self, fallback: bool, now: float) -> None:
        """What answers now; since when is known to a tick, or to the last look at it."""
        if self.fallback not in (None, fallback):
            self.fallback_since = now
        self.fallback = fallback

    def window(self, totals: Totals) -> Totals:
        """What the last :data:`WINDOW_TICKS` ticks and the time since then grew by."""
        past: Totals = np.nansum(self.rows[-WINDOW_TICKS:, : len(totals)], axis=0, dtype=np.float64)
        return past + self.growth(totals)


class History:
    """:meth:`tick` is for a thread, every :data:`TICK_SECONDS`; :meth:`read` for whoever wants to know. ``wall`` is in
    Unix seconds, for people."""

    def __init__(
        self, source: Source, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> None:
        self._source = source
        self._clock = clock
        self._wall = wall
        self._lock = threading.Lock()
        self._at = clock()
        self._lengths: deque[float] = deque([0.0] * TICKS, TICKS)  # of the ticks, seconds
        self._models: dict[Key, _Track] = {}
        self._door = _Track(len(REFUSALS), np.zeros(len(REFUSALS)))

    def tick(self) -> None:
        """Keep what has happened since the last one. Models that are gone are forgotten."""
        with self._lock:
            read, now = Reading(self._source()), self._clock()
            self._lengths.append(now - self._at)
            self._at = now
            self._door.append(read.refused)
            tracks = {key: self._track(key, totals) for key, totals in read.totals.items()}
            for key, track in tracks.items():
                track.append(read.totals[key], read.ratio(key))
                track.precision(_falls_back(read, key), self._wall())
            self._models = tracks

    def read(self) -> tuple[dict[Key, Recent], Door]:
        """Every model by name and version, up to this moment, and what was refused at the door."""
        with self._lock:
            read, since = Reading(self._source()), self._clock() - self._at
            models = {key: self._recent(key, totals, read, since) for key, totals in read.totals.items()}
            door = Door(_named(REFUSALS, self._door.window(read.refused)), _named(REFUSALS, read.refused))
        return models, door

    def _track(self, key: Key, totals: Totals) -> _Track:
        return self._models.get(key) or _Track(COLUMNS, totals)

    def _recent(self, key: Key, totals: Totals, read: Reading, since: float) -> Recent:
        track = self._track(key, totals)
        window = track.window(totals)
        seen = ~np.isnan(track.rows[:, 0])
        lengths = np.array(self._lengths)
        drift, gauges = read.drift.get(key, {}), read.gauges.get(key, {})
        track.precision(_falls_back(read, key), self._wall())
        request, queue, compute = (_durations(window, name) for name in HISTOGRAMS)
        return Recent(
            seconds=float(lengths[-WINDOW_TICKS:][seen[-WINDOW_TICKS:]].sum() + since),
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
            trend=_trend(track.rows[seen], lengths[seen]),
        )


def _falls_back(read: Reading, key: Key) -> bool:
    return read.live.get(key, {}).get(ACTIVE, {}).get(()) == 1


def _counts(totals: Totals) -> Counts:
    part = LAYOUT.parts
    return Counts(
        codes=_named(CODES, totals[part["bf16kit_requests_total"]]),
        rejected=_named(words.REJECTIONS, totals[part["bf16kit_rejected_total"]]),
        samples=_named(words.OUTCOMES, totals[part["bf16kit_drift_samples_total"]]),
        rows=int(totals[part["bf16kit_rows_total"]].sum()),
        batches=int(totals[part["bf16kit_executions_total"]].sum()),
    )


def _named(names: Sequence[str], counts: Totals) -> dict[str, int]:
    return {name: int(count) for name, count in zip(names, counts, strict=True) if count}


def _durations(totals: Totals, name: str) -> Durations:
    return durations(
        words.SECONDS, totals[LAYOUT.parts[f"{name}_bucket"]], float(totals[LAYOUT.parts[f"{name}_sum"]].sum())
    )


def _trend(rows: Rows, lengths: Totals) -> Trend:
    """``rows`` are those ticks in which the model was there, ``lengths`` their seconds."""
    if not len(rows):
        return Trend()
    request, queue, _ = HISTOGRAMS
    part, lengths = LAYOUT.parts, np.maximum(lengths, 1e-3)
    requests = rows[:, part["bf16kit_requests_total"]].sum(axis=1) / lengths
    waiting = rows[:, part[f"{queue}_sum"]].sum(axis=1) / lengths
    p99 = quantiles(words.SECONDS, rows[:, part[f"{request}_bucket"]].astype(np.float64), 0.99)
    return Trend(_listed(requests), _listed(p99), _listed(waiting), _listed(rows[:, -1].astype(np.float64)))


def _listed(values: Totals) -> tuple[float | None, ...]:
    """Four digits are more than a picture shows."""
    return tuple(None if value != value else float(f"{value:.4g}") for value in values.tolist())
