"""Which live requests are measured, and copies of them.

Offering a request costs the caller well under a microsecond when it is not chosen, and copying the rows to measure when
it is.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from service.contract import Array
from service.drift.observer import ShadowObserver
from service.drift.policy import ShadowPolicy
from service.request import Reply, Request


@dataclass(frozen=True, slots=True)
class Sample:
    """The rows to measure of a chosen request: feeds as they ran, the outputs that were answered; copies of both.

    ``probability``, in (0, 1], is that with which each of its rows came to be here: a row counts 1 ÷ ``probability``
    times. ``precision`` is that of what made ``outputs``, as in :class:`~service.request.Reply`.
    """

    feeds: dict[str, Array]
    outputs: dict[str, Array]
    rows: int
    nbytes: int
    probability: float = 1.0
    precision: str = ""


class TokenBucket:
    """At most ``per_second`` on average, with a burst of one second's worth (at least one)."""

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = per_second
        self._capacity = max(1.0, per_second)
        self._clock = clock
        self._tokens = self._capacity
        self._at = clock()
        self._lock = threading.Lock()

    def take(self) -> bool:
        with self._lock:
            now = self._clock()
            self._tokens = min(self._capacity, self._tokens + (now - self._at) * self._rate)
            self._at = now
            if self._tokens < 1:
                return False
            self._tokens -= 1
            return True


class Chooser:
    """Chooses by chance which requests are measured, and copies what is measured of them."""

    def __init__(
        self, policy: ShadowPolicy, observer: ShadowObserver, batch_axis: int | None, draw: Callable[[], float]
    ) -> None:
        self._policy = policy
        self._observer = observer
        self._batch_axis = batch_axis
        self._draw = draw
        self._tokens = TokenBucket(policy.max_per_second)

    def choose(self, request: Request, reply: Reply, hold: Callable[[int], bool]) -> Sample | None:
        """The sample of a request that is chosen and for which there is room: ``hold`` takes so many bytes, or not."""
        if self._draw() >= self._policy.rate or request.rows == 0:
            return None
        rows = min(request.rows, self._policy.max_rows) if self._batch_axis is not None else 1
        if not self._tokens.take():
            self._observer.sampled("dropped", rows)
            return None
        feeds = sample_of(request.feeds, rows, self._batch_axis)
        outputs = sample_of(reply.outputs, rows, self._batch_axis)
        nbytes = size_of(feeds) + size_of(outputs)
        if not hold(nbytes):
            self._observer.sampled("dropped", rows)
            return None
        return Sample(copies(feeds), copies(outputs), rows, nbytes, precision=reply.precision)


class Sampler(Protocol):
    """What a model offers its answers to."""

    def start(self) -> None: ...
    def offer(self, request: Request, reply: Reply) -> None: ...
    def stop(self) -> None: ...
    def close(self, deadline: float = math.inf) -> bool: ...


class Handing:
    """A :class:`Sampler` that hands what it chooses to another process, which has the reference, and loads nothing.

    ``hand`` is to return at once; it says later, to the observer, what became of a sample that was not measured.
    """

    def __init__(
        self,
        hand: Callable[[Sample, ShadowObserver], None],
        policy: ShadowPolicy,
        observer: ShadowObserver,
        *,
        batch_axis: int | None,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._hand = hand
        self._most = policy.max_bytes
        self._observer = observer
        self._chooser = Chooser(policy, observer, batch_axis, draw)
        self._closed = False

    def start(self) -> None:
        """There is nothing to load."""

    def offer(self, request: Request, reply: Reply) -> None:
        """See :meth:`Shadow.offer`."""
        if self._closed:
            return
        sample = self._chooser.choose(request, reply, lambda nbytes: nbytes <= self._most)
        if sample is not None:
            self._hand(sample, self._observer)

    def stop(self) -> None:
        self._closed = True

    def close(self, deadline: float = math.inf) -> bool:
        """Nothing is at work here."""
        self._closed = True
        return True


def sample_of(arrays: Mapping[str, Array], rows: int, batch_axis: int | None) -> dict[str, Array]:
    """The first ``rows`` rows of each array, as views; all of it without a batch axis."""
    if batch_axis is None:
        return dict(arrays)
    window = (slice(None),) * batch_axis + (slice(0, rows),)
    return {name: array[window] for name, array in arrays.items()}


def size_of(arrays: Mapping[str, Array]) -> int:
    """The bytes that a copy of ``arrays`` holds; a string counts its characters."""
    return sum(
        array.nbytes + (sum(map(len, array.flat)) if array.dtype == np.object_ else 0) for array in arrays.values()
    )


def copies(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The same arrays, C-contiguous, in memory of their own: a view would keep the whole message or batch alive."""
    return {name: np.array(array, order="C") for name, array in arrays.items()}
