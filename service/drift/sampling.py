"""Chooses the live requests to measure, and copies them.

Offering a request costs the caller about a microsecond if it is not chosen. If it is chosen, it also costs the copy of
the rows to measure.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from bf16kit.numerics.tensors import TensorSpec
from service.contract import Array
from service.drift.observer import Outcome, OutcomeObserver
from service.drift.policy import ShadowPolicy
from service.drift.strata import Strata
from service.request import Reply, Request, Timings

MAX_IN_FLIGHT = 64  # samples of one model in flight: being sent, waiting for the reference or being measured
BURST = 8.0  # samples at once, after a while without any
_NO_TIMINGS = Timings()


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
    """Admits at most ``per_second`` samples on average.

    After a pause it admits ``per_second`` or :data:`BURST` at once, whichever is more. It starts with one second's
    worth, at least one.
    """

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = per_second
        self._capacity = max(BURST, per_second)
        self._clock = clock
        self._tokens = max(1.0, per_second)
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


class Chooser:
    """Chooses requests to measure at random, and copies the rows to measure.

    It must receive the outcome of its samples (:meth:`sampled`): after a dropped one it chooses fewer.
    """

    def __init__(
        self,
        policy: ShadowPolicy,
        observer: OutcomeObserver,
        batch_axis: int | None,
        draw: Callable[[], float],
        inputs: Sequence[TensorSpec] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``draw`` returns numbers in [0, 1). Requests are classified by the sizes of the free dimensions of
        ``inputs``."""
        self._policy = policy
        self._observer = observer
        self._batch_axis = batch_axis
        self._draw = draw
        self._strata = Strata(policy, inputs, clock)
        self._tokens = TokenBucket(policy.max_per_second, clock)

    def choose(self, request: Request, reply: Reply, reserve: Callable[[int], bool]) -> Sample | None:
        """Return the request's sample if it is chosen and there is room, else None.

        ``reserve`` reserves a number of bytes, and returns whether there was room for them.
        """
        rows = request.rows
        if rows == 0:
            return None
        probability = self._strata.probability(request.feeds, (request.timings or _NO_TIMINGS).arrived)
        if self._draw() >= probability:
            return None
        kept = None
        if self._batch_axis is None:
            rows = 1
        elif rows > self._policy.max_rows:
            rows = self._policy.max_rows
            kept = random_indices(request.rows, rows, self._draw)
            probability *= rows / request.rows
        if not self._tokens.try_acquire():
            self._observer.sampled("dropped", rows)
            return None
        parts = [(arrays, kept, self._batch_axis) for arrays in (request.feeds, reply.outputs)]
        nbytes = sum(size_of(*part) for part in parts)
        if nbytes > self._policy.max_bytes:  # it never fits, even into an empty queue
            self._observer.sampled("dropped", rows)
            return None
        if not reserve(nbytes):
            self.sampled("dropped", rows)
            return None
        feeds, outputs = (copies(*part) for part in parts)
        return Sample(feeds, outputs, rows, nbytes, probability, reply.precision, client=request.client)

    def sampled(self, outcome: Outcome, samples: int) -> None:
        """Report the outcome of samples that this chose; see :class:`OutcomeObserver`."""
        if outcome == "dropped":
            self._strata.note_dropped_sample()
        self._observer.sampled(outcome, samples)


class SampleSender(Protocol):
    """Sends the samples of one model to the process with its reference."""

    def send(self, sample: Sample, observer: OutcomeObserver) -> None:
        """Send a sample. Returns at once; ``observer`` receives the outcome later."""

    def finish(self) -> None:
        """Announce that no more samples will come, so the reference is not needed."""


class SampleForwarder:
    """Chooses samples and forwards them to another process, which has the reference. Loads nothing itself."""

    def __init__(
        self,
        sender: SampleSender,
        policy: ShadowPolicy,
        observer: OutcomeObserver,
        *,
        batch_axis: int | None,
        inputs: Sequence[TensorSpec] = (),
        profile: str = "",
        draw: Callable[[], float] = random.random,
    ) -> None:
        """``profile`` is the artifact's profile that answers."""
        self._sender = sender
        self._profile = profile
        self._max_bytes = policy.max_bytes
        self._lock = threading.Lock()
        self._in_flight = self._bytes_in_use = 0  # samples without an outcome yet, and their bytes
        self._chooser = Chooser(policy, observer, batch_axis, draw, inputs)
        self._closed = False

    def offer(self, request: Request, reply: Reply) -> None:
        """Choose at random whether to measure this request. Never blocks, never raises."""
        if self._closed:
            return
        sample = self._chooser.choose(request, reply, self._reserve)
        if sample is not None:
            pending = _PendingSample(self._chooser, sample.nbytes, self._release)
            self._sender.send(replace(sample, profile=self._profile), pending)

    def stop(self) -> None:
        self._closed = True

    def close(self) -> None:
        """End, once every request has ended that might still offer its response."""
        self._closed = True
        self._sender.finish()

    def _reserve(self, nbytes: int) -> bool:
        with self._lock:
            if self._in_flight >= MAX_IN_FLIGHT or self._bytes_in_use + nbytes > self._max_bytes:
                return False
            self._in_flight += 1
            self._bytes_in_use += nbytes
            return True

    def _release(self, nbytes: int) -> None:
        with self._lock:
            self._in_flight -= 1
            self._bytes_in_use -= nbytes


class _PendingSample:
    """Receives the outcome of one sample, and releases its room."""

    __slots__ = ("_nbytes", "_observer", "_release")

    def __init__(self, observer: OutcomeObserver, nbytes: int, release: Callable[[int], None]) -> None:
        self._observer = observer
        self._nbytes = nbytes
        self._release = release

    def sampled(self, outcome: Outcome, samples: int) -> None:
        self._release(self._nbytes)
        self._observer.sampled(outcome, samples)


def random_indices(rows: int, count: int, draw: Callable[[], float]) -> list[int]:
    """Return ``count`` distinct ones of ``rows``, equally likely, sorted (the first steps of the Fisher-Yates
    shuffle)."""
    swapped: dict[int, int] = {}
    indices = []
    for at in range(count):
        other = at + int(draw() * (rows - at))
        indices.append(swapped.get(other, other))
        swapped[other] = swapped.get(at, at)
    return sorted(indices)


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
