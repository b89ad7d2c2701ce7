"""Chooses the live requests to measure, and copies the rows to measure.

A request's probability depends on when the requests before it came, and never on the draw or on its content. Weights of
1 ÷ probability are therefore unbiased however poor the estimate of the rate is; it only decides how much is measured
(Horvitz and Thompson 1952; docs/decisions/0055).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from service.contract import Array
from service.drift.driftpolicy import ShadowPolicy

BURST_S = 48.0  # of max_per_second at once, after a pause: what a thousandfold burst takes until its rate is known
FLOOR = 0.5  # samples per second, if so many requests come: ``rate`` of a quiet model would be none for hours
_HEADROOM = 0.8  # the most that is aimed at, as a share of max_per_second: arrivals at random have bursts
_MEMORY_S = 8.0  # a request of this age counts 1/e: shorter is less certain, longer drops more of a burst
_LEAST_ROOM = 1 / 16  # share of the aim, however many samples find no room
_GROWTH = 1.1  # of that share, in a second without dropped samples

Outcome = Literal["measured", "dropped", "failed"]
OnOutcome = Callable[[Outcome], None]


@dataclass(frozen=True, slots=True)
class Sample:
    """The rows to measure of a chosen request: copies of the inputs as they ran and of the outputs that were answered.

    ``probability``, in (0, 1], is each row's sampling probability; a row counts 1 ÷ ``probability`` times.
    ``precision`` is that of the outputs, as in :class:`~service.request.Reply`. ``profile`` is the profile of the
    artifact that computed them, for which conversion measured the drift; "" if unknown. ``client`` is the request's.
    """

    feeds: dict[str, Array]
    outputs: dict[str, Array]
    rows: int
    nbytes: int
    probability: float = 1.0
    precision: str = ""
    profile: str = ""
    client: str = ""


class TokenBucket:
    """Admits at most ``per_second`` samples on average, and those of :data:`BURST_S` at once. It starts full."""

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = per_second
        self._tokens = self._capacity = max(1.0, BURST_S * per_second)
        self._clock = clock
        self._at = clock()
        self._lock = threading.Lock()

    def try_acquire(self) -> bool:
        with self._lock:
            now = self._clock()
            self._tokens = min(self._capacity, self._tokens + (now - self._at) * self._rate)
            self._at = now
            if self._tokens < 1:
                return False
            self._tokens -= 1
            return True


class Sampler:
    """Gives the probability with which each request is measured. For any thread.

    ``rate`` of the requests are measured, but at least :data:`FLOOR` a second and at most 0.8 of ``max_per_second``.
    """

    def __init__(self, policy: ShadowPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = policy.rate
        self._most = _HEADROOM * policy.max_per_second
        self._clock = clock
        self._lock = threading.Lock()
        self._earlier = 0.0  # requests, with exponential decay
        self._at = self._dropped_at = clock()
        self._room = 1.0  # share of the aim, when a sample was last dropped

    def probability(self) -> float:
        """Return the probability, in (0, 1], for a request that is answered now, and count the request."""
        with self._lock:
            now = self._clock()
            self._earlier *= math.exp((self._at - now) / _MEMORY_S)
            per_second = max(1.0, self._earlier) / _MEMORY_S
            self._at, self._earlier = now, self._earlier + 1
            aim = min(max(self._rate * per_second, FLOOR), self._most * self._current_room(now))
            return min(1.0, aim / per_second)

    def note_dropped_sample(self) -> None:
        """Note that a chosen sample found no room: half as many are chosen, and a tenth more with each second."""
        with self._lock:
            now = self._clock()
            if now >= self._dropped_at + 1:
                self._room, self._dropped_at = max(_LEAST_ROOM, self._current_room(now) / 2), now

    def _current_room(self, now: float) -> float:
        return min(1.0, self._room * math.pow(_GROWTH, min(now - self._dropped_at, 60.0)))


def size_of(arrays: Mapping[str, Array], kept: Sequence[int] | None = None, batch_axis: int | None = None) -> int:
    """Return the bytes that :func:`copies` of ``arrays`` hold. A string counts its characters."""
    total = 0
    for array in arrays.values():
        if array.dtype == np.object_:
            array = _rows(array, kept, batch_axis)
            total += sum(map(len, array.flat)) + array.nbytes
        elif kept is None or batch_axis is None:
            total += array.nbytes
        else:
            total += array.nbytes // array.shape[batch_axis] * len(kept)
    return total


def copies(
    arrays: Mapping[str, Array], kept: Sequence[int] | None = None, batch_axis: int | None = None
) -> dict[str, Array]:
    """Return C-contiguous copies of each array's rows ``kept``; of whole arrays if ``kept`` or ``batch_axis`` is None.

    They own their memory: a view would keep the whole message or batch alive.
    """
    if kept is None or batch_axis is None:
        return {name: np.array(array, order="C") for name, array in arrays.items()}
    return {name: np.ascontiguousarray(_rows(array, kept, batch_axis)) for name, array in arrays.items()}


def _rows(array: Array, kept: Sequence[int] | None, batch_axis: int | None) -> Array:
    return array if kept is None or batch_axis is None else np.take(array, kept, axis=batch_axis)
