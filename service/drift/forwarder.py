"""Takes samples of live requests, and forwards them to the process with the reference.

Offering a request costs the caller about a microsecond if it is not chosen. If it is chosen, it also costs the copy of
the rows to measure.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Protocol

from bf16kit.messages.errors import Bf16kitError
from bf16kit.messages.wording import brief
from service.contract import Array
from service.drift.driftpolicy import ShadowPolicy
from service.drift.sampler import (
    Outcome,
    OutcomeObserver,
    Sample,
    Sampler,
    TokenBucket,
    copies,
    random_indices,
    size_of,
)
from service.drift.shadow import MAX_BYTES, QUEUE_SIZE, lower_priority
from service.request import Reply, Request

_log = logging.getLogger(__name__)
Run = Callable[[Mapping[str, Array], Sequence[str]], tuple[dict[str, Array], str]]


class SampleSender(Protocol):
    """Sends the samples of one model to the process with its reference."""

    def send(self, sample: Sample, observer: OutcomeObserver) -> None:
        """Send a sample. Returns at once; ``observer`` receives the outcome later."""

    def finish(self) -> None:
        """Announce that no more samples will come, so the reference is not needed."""


class SampleForwarder:
    """Chooses samples and forwards them to another process, which has the reference. Loads nothing itself.

    At most :data:`QUEUE_SIZE` samples and :data:`MAX_BYTES` are in flight: being sent, waiting or being measured.
    """

    def __init__(
        self,
        sender: SampleSender,
        policy: ShadowPolicy,
        observer: OutcomeObserver,
        *,
        batch_axis: int | None,
        profile: str = "",
        draw: Callable[[], float] = random.random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``profile`` is the artifact's profile that answers. ``draw`` returns numbers in [0, 1)."""
        self._sender = sender
        self._observer = observer
        self._max_rows = policy.max_rows
        self._batch_axis = batch_axis
        self._profile = profile
        self._draw = draw
        self._sampler = Sampler(policy, clock)
        self._tokens = TokenBucket(policy.max_per_second, clock)
        self._lock = threading.Lock()
        self._in_flight = self._bytes_in_use = 0  # samples without an outcome yet, and their bytes
        self._closed = False

    def offer(self, request: Request, reply: Reply) -> None:
        """Choose at random whether to measure this request. Never blocks, never raises."""
        if self._closed or not request.rows:
            return
        probability = self._sampler.probability()
        if self._draw() < probability and (sample := self._sample(request, reply, probability)) is not None:
            self._sender.send(sample, _PendingSample(self._measured, sample.nbytes))

    def stop(self) -> None:
        self._closed = True

    def close(self) -> None:
        """End, once every request has ended that might still offer its response."""
        self._closed = True
        self._sender.finish()

    def _sample(self, request: Request, reply: Reply, probability: float) -> Sample | None:
        """Return the sample of a chosen request; None if there is no room for it."""
        rows, kept, axis = request.rows, None, self._batch_axis
        if axis is None:
            rows = 1
        elif rows > self._max_rows:
            rows = self._max_rows
            kept = random_indices(request.rows, rows, self._draw)
            probability *= rows / request.rows
        if not self._tokens.try_acquire():
            self._observer.sampled("dropped", rows)
            return None
        nbytes = sum(size_of(arrays, kept, axis) for arrays in (request.feeds, reply.outputs))
        if not self._reserve(nbytes):
            if nbytes <= MAX_BYTES:  # otherwise it never fits, however few are chosen
                self._sampler.note_dropped_sample()
            self._observer.sampled("dropped", rows)
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

    def _measured(self, outcome: Outcome, samples: int, nbytes: int) -> None:
        with self._lock:
            self._in_flight -= 1
            self._bytes_in_use -= nbytes
        if outcome == "dropped":
            self._sampler.note_dropped_sample()
        self._observer.sampled(outcome, samples)


class _PendingSample:
    """Receives the outcome of one sample in flight."""

    __slots__ = ("_nbytes", "_on_outcome")

    def __init__(self, on_outcome: Callable[[Outcome, int, int], None], nbytes: int) -> None:
        self._on_outcome = on_outcome
        self._nbytes = nbytes

    def sampled(self, outcome: Outcome, samples: int) -> None:
        self._on_outcome(outcome, samples, self._nbytes)


class Probe:
    """A :class:`SampleSender` in front of another: while fp32 answers, it runs the samples on bf16 first.

    So bf16's drift is still measured, and it can take over again. Samples whose outputs have ``precision`` are passed
    on unchanged. For others ``run`` computes the outputs again, on a thread of low priority that starts with the first.
    :class:`SampleForwarder` bounds what waits.
    """

    def __init__(self, name: str, precision: str, run: Run, sender: SampleSender) -> None:
        self._name = name
        self._precision = precision
        self._run = run
        self._sender = sender
        self._thread = ThreadPoolExecutor(1, f"{name}-probe")
        self._started = self._stopped = False
        self._lock = threading.Lock()
        self._end: Future[object] | None = None  # of all work

    def send(self, sample: Sample, observer: OutcomeObserver) -> None:
        """See :meth:`SampleSender.send`."""
        if sample.precision == self._precision:
            self._sender.send(sample, observer)
        elif not self._queue(sample, observer):
            observer.sampled("dropped", sample.rows)

    def finish(self) -> None:
        """See :meth:`SampleSender.finish`."""
        self._sender.finish()

    def stop(self) -> None:
        """Run no further sample: those that wait are dropped. Does not wait for the one that runs."""
        with self._lock:
            if self._started and not self._stopped:
                self._end = self._thread.submit(int)
            self._stopped = True
            self._thread.shutdown(wait=False)

    def close(self, deadline: float = math.inf) -> bool:
        """End the thread. False when it still runs at ``deadline``, in :func:`time.monotonic` seconds."""
        self.stop()
        return self._end is None or not wait([self._end], max(0.0, min(deadline - time.monotonic(), 1e6))).not_done

    def _queue(self, sample: Sample, observer: OutcomeObserver) -> bool:
        with self._lock:
            if self._stopped:
                return False
            try:
                if not self._started:  # by itself: work remains queued if no thread can be started for it
                    self._thread.submit(lower_priority)
                    self._started = True
                self._thread.submit(self._measure, sample, observer)
            except RuntimeError as error:  # the system has no thread left; the client gets its response all the same
                _log.warning("%s: a sample that fp32 answered cannot be run on bf16: %s", self._name, error)
                return False
            return True

    def _measure(self, sample: Sample, observer: OutcomeObserver) -> None:
        """Run one sample, on the thread."""
        if self._stopped:
            observer.sampled("dropped", sample.rows)
            return
        try:
            outputs, precision = self._run(sample.feeds, tuple(sample.outputs))
        except Bf16kitError as error:
            _log.error("%s: bf16 failed on a sample that fp32 answered: %s", self._name, brief(error))
            observer.sampled("failed", sample.rows)
        except Exception:  # noqa: BLE001 - one sample that fails must not end the measuring
            _log.exception("%s: bf16 failed on a sample that fp32 answered", self._name)
            observer.sampled("failed", sample.rows)
        else:
            nbytes = size_of(sample.feeds) + size_of(outputs)
            self._sender.send(replace(sample, outputs=outputs, nbytes=nbytes, precision=precision), observer)
