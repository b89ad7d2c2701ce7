"""Live drift: a share of the requests is run again on the fp32 reference, off the hot path, and compared.

One thread of low priority per model, before it a short queue. Offering a request costs the caller well under a
microsecond when it is not chosen, and copying the rows to measure when it is. When the queue or the rate is full the
sample is dropped and counted, not waited for.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from bf16kit.errors import Bf16kitError
from bf16kit.runtime import Runtime
from bf16kit.wording import brief
from service.contract import Array
from service.drift.comparison import Comparison, DriftObserver, copies, sample_of, size_of
from service.request import Reply, Request

_log = logging.getLogger(__name__)
QUEUE_SIZE = 8
LONGEST_RUN_S = 60.0  # of the reference; what takes longer measures nothing that anybody waits for
# Not 19: this thread holds Python's lock for a moment now and then, and one that the kernel never schedules would hold
# it for long while request threads wait.
NICENESS = 10


class ShadowPolicy(BaseModel):
    """Which live requests are run again on the fp32 reference.

    The defaults cost little on a busy model (one request in a hundred, one a second at most) and still give an idle one
    a sample now and then. ``rate`` 0 turns the shadow off, and the reference is then never loaded.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    rate: float = Field(default=0.01, ge=0, le=1)
    max_per_second: float = Field(default=1.0, gt=0)
    max_rows: PositiveInt = 8  # of one request; the rest of a larger one is not measured
    max_bytes: PositiveInt = 64 << 20  # of the samples that wait, inputs and outputs


class ShadowObserver(DriftObserver, Protocol):
    """Told what became of each sample (row), and its drift."""

    def sampled(self, outcome: Literal["measured", "dropped", "failed"], samples: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Sample:
    """The rows to measure of a chosen request: feeds as they ran, the outputs that were answered; copies of both."""

    feeds: dict[str, Array]
    outputs: dict[str, Array]
    rows: int
    nbytes: int


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
        return Sample(copies(feeds), copies(outputs), rows, nbytes)


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


class Shadow:
    """:meth:`start` loads the reference in the background, once; :meth:`close` ends the thread."""

    def __init__(
        self,
        load: Callable[[], Runtime],
        comparison: Comparison,
        policy: ShadowPolicy,
        observer: ShadowObserver,
        *,
        name: str,
        batch_axis: int | None,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._load = load
        self._comparison = comparison
        self._policy = policy
        self._observer = observer
        self._name = name
        self._chooser = Chooser(policy, observer, batch_axis, draw)
        self._tokens = TokenBucket(policy.max_per_second)  # of samples that other processes have chosen
        self._queue: queue.Queue[Sample | None] = queue.Queue(QUEUE_SIZE)
        self._lock = threading.Lock()
        self._held = 0  # bytes of the samples that wait or are measured
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=f"{name}-shadow", daemon=True)

    def start(self) -> None:
        if self._thread.ident is None and not self._closed:
            self._thread.start()

    def offer(self, request: Request, reply: Reply) -> None:
        """Choose by chance whether to measure this request; never blocks, never raises."""
        sample = self._chooser.choose(request, reply, self._hold)
        if sample is not None and not self._enqueue(sample):
            self._observer.sampled("dropped", sample.rows)

    def put(self, sample: Sample) -> bool:
        """Measure what another process has chosen; False where there is no room for it, or no time."""
        return self._tokens.take() and self._hold(sample.nbytes) and self._enqueue(sample)

    def _enqueue(self, sample: Sample) -> bool:
        try:
            self._queue.put_nowait(sample)
        except queue.Full:
            self._hold(-sample.nbytes)
            return False
        return True

    def stop(self) -> None:
        """Tell the thread to end after the sample it is at; does not wait for it."""
        self._closed = True
        with contextlib.suppress(queue.Full):  # then the thread is not waiting, and sees that it is closed
            self._queue.put_nowait(None)

    def close(self, deadline: float = math.inf) -> bool:
        """End the thread. False when it still runs at ``deadline``, in :func:`time.monotonic` seconds: it is left
        behind, a daemon inside native code that nothing can interrupt."""
        self.stop()
        if self._thread.ident is None:
            return True
        self._thread.join(None if deadline == math.inf else max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _hold(self, nbytes: int) -> bool:
        """Take so many bytes (less than 0: give them back); False where that would hold more than may wait."""
        with self._lock:
            if nbytes > 0 and (self._held + nbytes > self._policy.max_bytes or self._queue.full()):
                return False
            self._held += nbytes
            return True

    # --- the shadow's thread ------------------------------------------------------------------------------------------

    def _work(self) -> None:
        lower_priority()  # before loading: the threads that a session starts inherit it
        reference = None if self._closed else self._loaded()
        while not self._closed and (sample := self._queue.get()) is not None:
            self._measure(reference, sample)
            self._hold(-sample.nbytes)
        if reference is not None:
            reference.close()

    def _loaded(self) -> Runtime | None:
        begun = time.monotonic()
        try:
            reference = self._load()
        except Exception as error:  # noqa: BLE001 - without a reference the model still serves, and says so
            reason = str(error) if isinstance(error, Bf16kitError) else repr(error)
            _log.error("%s: no live drift: the fp32 reference cannot be loaded: %s", self._name, reason)
            return None
        _log.info("%s: live drift on: fp32 reference loaded in %.1f s", self._name, time.monotonic() - begun)
        return reference

    def _measure(self, reference: Runtime | None, sample: Sample) -> None:
        if reference is None:
            self._observer.sampled("failed", sample.rows)
            return
        try:
            expected = reference.run(sample.feeds, tuple(sample.outputs), seconds=LONGEST_RUN_S)
            self._comparison.observe(expected, sample.outputs, self._observer)
        except Bf16kitError as error:
            _log.error("%s: a shadow sample failed: %s", self._name, brief(error))
            self._observer.sampled("failed", sample.rows)
        except Exception:  # noqa: BLE001 - one sample that fails must not end the measuring
            _log.exception("%s: a shadow sample failed", self._name)
            self._observer.sampled("failed", sample.rows)
        else:
            self._observer.sampled("measured", sample.rows)


def lower_priority() -> None:
    """Run the calling thread (on Linux, it alone) after everything else that wants the processor."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
