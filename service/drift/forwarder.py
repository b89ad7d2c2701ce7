"""Takes samples of live requests, and forwards them to the process with the reference.

Offering a request costs the caller about a microsecond if it is not chosen. If it is chosen, it also costs the copy of
the rows to measure.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import Protocol

from bf16kit.messages.errors import Bf16kitError
from bf16kit.messages.wording import brief
from service.contract import Array
from service.drift.driftpolicy import ShadowPolicy
from service.drift.sampler import OnOutcome, Outcome, Sample, Sampler, TokenBucket, copies, size_of
from service.drift.shadow import MAX_BYTES, QUEUE_SIZE, lower_priority
from service.request import Reply, Request

_log = logging.getLogger(__name__)
_CHANCE = random.Random()  # noqa: S311 -- nothing secret
Run = Callable[[Mapping[str, Array], Sequence[str]], tuple[dict[str, Array], str]]


class SampleSender(Protocol):
    """Sends the samples of one model to the process with its reference."""

    def send(self, sample: Sample, on_outcome: OnOutcome) -> None:
        """Send a sample. Returns at once; ``on_outcome`` is called later, on any thread."""

    def finish(self) -> None:
        """Announce that no more samples will come, so the reference is not needed."""


class SampleForwarder:
    """Chooses samples and forwards them to another process, which has the reference. Loads nothing itself.

    While fp32 answers, it runs the samples on bf16 first: bf16's drift is still measured, and bf16 can take over again.
    At most :data:`QUEUE_SIZE` samples and :data:`MAX_BYTES` are in flight: being run or sent, waiting, or being
    measured.
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
        run_bf16: Run,
        chance: random.Random = _CHANCE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``sampled`` counts samples (rows) by their outcome. ``profile`` is the artifact's that answers.

        ``run_bf16`` computes the outputs again of samples whose outputs do not have ``precision``, on a thread of low
        priority that starts with the first.
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
        """Choose no more samples, and drop those that wait to be run on bf16. Does not wait for the one that runs."""
        self._closed = True
        self._thread.shutdown(wait=False)

    def close(self, deadline: float) -> bool:
        """End, once every request has ended that might still offer its response.

        False when bf16 still runs a sample at ``deadline``, in :func:`time.monotonic` seconds.
        """
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
        except Bf16kitError as error:
            _log.error("%s: bf16 failed on a sample that fp32 answered: %s", self._name, brief(error))
            on_outcome("failed")
        except Exception:  # noqa: BLE001 - one sample that fails must not end the measuring
            _log.exception("%s: bf16 failed on a sample that fp32 answered", self._name)
            on_outcome("failed")
        else:
            nbytes = size_of(sample.feeds) + size_of(outputs)
            self._sender.send(replace(sample, outputs=outputs, nbytes=nbytes, precision=precision), on_outcome)
