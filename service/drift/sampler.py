"""Takes samples of live requests: chooses requests, copies the rows to measure, and forwards these.

Offering a request costs the caller about a microsecond if it is not chosen, and otherwise the copy too. A request's
probability depends on when the requests before it came, and never on the draw or on its content. Weights of
1 ÷ probability are therefore unbiased however poor the estimate of the rate is; it only decides how much is measured
(Horvitz and Thompson 1952; docs/decisions/0055).
"""

from __future__ import annotations

import logging
import math
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Protocol

import numpy as np

from bf16kit.messages.errors import Bf16kitError
from bf16kit.messages.wording import brief
from bf16kit.service.contract import Array
from bf16kit.service.drift.contract import ShadowPolicy
from bf16kit.service.request import Reply, Request

_log = logging.getLogger(__name__)
_CHANCE = random.Random()  # noqa: S311 -- nothing secret
QUEUE_SIZE = 64  # samples of one model that wait or are measured
MAX_BYTES = 64 << 20  # their inputs and outputs: a slow reference must not fill the memory
# A tenth of the share of a thread at 0, whatever the number of threads. With 19 or SCHED_IDLE, a full machine leaves
# next to nothing (docs/decisions/0056), and a thread that then holds Python's lock keeps others waiting for it.
NICENESS = 10
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
    ``precision`` is that of the outputs, as in :class:`~bf16kit.service.request.Reply`. ``profile`` is the profile of
    the artifact that computed them, for which conversion measured the drift; "" if unknown. ``client`` is the
    request's.
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


def lower_priority() -> None:
    """Lower the calling thread's priority (on Linux, of it alone, and of the threads that it starts)."""
    thread = threading.get_native_id()
    # Niceness cannot be taken back: a process may have been started with more.
    os.setpriority(os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


class SampleSender(Protocol):
    """Sends the samples of one model to the process with its reference, which is not needed after :meth:`finish`."""

    def send(self, sample: Sample, on_outcome: OnOutcome) -> None:
        """Send a sample. Returns at once; ``on_outcome`` is called later, on any thread."""

    def finish(self) -> None: ...


class SampleForwarder:
    """Chooses samples and forwards them.

    While fp32 answers, it runs the samples on bf16 first: bf16's drift is still measured, and bf16 can take over again.
    At most :data:`QUEUE_SIZE` samples and :data:`MAX_BYTES` have no outcome yet.
    """

    def __init__(
        self,
        sender: SampleSender,
        policy: ShadowPolicy,
        sampled: Callable[[Outcome, int], None],
        *,
        name: str,
        batch_axis: int | None,
        profile: str,
        precision: str,
        run_bf16: Callable[[Mapping[str, Array], Sequence[str]], tuple[dict[str, Array], str]],
        chance: random.Random = _CHANCE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``sampled`` counts rows by outcome. ``profile`` is the artifact's that answers.

        ``run_bf16`` computes outputs that do not have ``precision`` again, on a thread of low priority.
        """
        self._sender = sender
        self._sampled = sampled
        self._name = name
        self._max_rows = policy.max_rows
        self._batch_axis = batch_axis
        self._profile = profile
        self._precision = precision
        self._run_bf16 = run_bf16
        self._chance = chance
        self._sampler = Sampler(policy, clock)
        self._tokens = TokenBucket(policy.max_per_second, clock)
        self._closed = False
        self._thread = ThreadPoolExecutor(1, f"{name}-probe")
        self._lock = threading.Lock()  # of the three below
        self._in_flight = self._bytes_in_use = 0  # samples without an outcome yet, and their bytes
        self._newest: Future[None] | None = None  # of the work on the thread

    def offer(self, request: Request, reply: Reply) -> None:
        """Choose at random whether to measure this request. Never blocks, never raises."""
        if self._closed or not request.rows:
            return
        probability = self._sampler.probability()
        if self._chance.random() < probability and (sample := self._sample(request, reply, probability)) is not None:
            on_outcome = partial(self._end, sample.rows, sample.nbytes)
            if sample.precision == self._precision:
                self._sender.send(sample, on_outcome)
            else:
                self._run_later(sample, on_outcome)

    def stop(self) -> None:
        """Choose no more samples, and drop those that wait to be run on bf16."""
        self._closed = True
        self._thread.shutdown(wait=False)

    def close(self, deadline: float) -> bool:
        """End, after the last request. False if bf16 still runs a sample at ``deadline``, in monotonic seconds."""
        self.stop()
        seconds = max(0.0, min(deadline - time.monotonic(), 1e6))  # the most that wait() takes is less than infinite
        ended = self._newest is None or not wait([self._newest], seconds).not_done
        self._sender.finish()
        return ended

    def _sample(self, request: Request, reply: Reply, probability: float) -> Sample | None:
        """Return the sample of a chosen request; None if there is no room for it."""
        rows, kept, axis = request.rows, None, self._batch_axis
        if axis is None:
            rows = 1
        elif rows > self._max_rows:
            rows = self._max_rows
            kept = sorted(self._chance.sample(range(request.rows), rows))
            probability *= rows / request.rows
        if not self._tokens.try_acquire():
            self._sampled("dropped", rows)
            return None
        nbytes = sum(size_of(arrays, kept, axis) for arrays in (request.feeds, reply.outputs))
        if not self._reserve(nbytes):
            if nbytes <= MAX_BYTES:  # otherwise it never fits, however few are chosen
                self._sampler.note_dropped_sample()
            self._sampled("dropped", rows)
            return None
        feeds, outputs = (copies(arrays, kept, axis) for arrays in (request.feeds, reply.outputs))
        return Sample(feeds, outputs, rows, nbytes, probability, reply.precision, self._profile, request.client)

    def _reserve(self, nbytes: int) -> bool:
        with self._lock:
            if self._in_flight >= QUEUE_SIZE or self._bytes_in_use + nbytes > MAX_BYTES:
                return False
            self._in_flight += 1
            self._bytes_in_use += nbytes
            return True

    def _end(self, rows: int, nbytes: int, outcome: Outcome) -> None:
        with self._lock:
            self._in_flight -= 1
            self._bytes_in_use -= nbytes
        if outcome == "dropped":
            self._sampler.note_dropped_sample()
        self._sampled(outcome, rows)

    # --- samples that fp32 answered -----------------------------------------------------------------------------------

    def _run_later(self, sample: Sample, on_outcome: OnOutcome) -> None:
        try:
            with self._lock:
                if self._newest is None:  # by itself: work remains queued if no thread can be started for it
                    self._newest = self._thread.submit(lower_priority)
                self._newest = self._thread.submit(self._run, sample, on_outcome)
        except RuntimeError as error:  # stopped, or the system has no thread left; the client gets its response
            if not self._closed:
                _log.warning("%s: a sample that fp32 answered cannot be run on bf16: %s", self._name, error)
            on_outcome("dropped")

    def _run(self, sample: Sample, on_outcome: OnOutcome) -> None:
        """Run one sample on bf16, on the thread, and send it."""
        if self._closed:
            on_outcome("dropped")
            return
        try:
            outputs, precision = self._run_bf16(sample.feeds, tuple(sample.outputs))
        except Exception as error:  # noqa: BLE001 - one sample that fails must not end the measuring
            bug = not isinstance(error, Bf16kitError)
            _log.error("%s: bf16 failed on a sample that fp32 answered: %s", self._name, brief(error), exc_info=bug)
            on_outcome("failed")
        else:
            nbytes = size_of(sample.feeds) + size_of(outputs)
            self._sender.send(replace(sample, outputs=outputs, nbytes=nbytes, precision=precision), on_outcome)


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
