"""Live drift: a share of the requests is run again on the fp32 reference, off the hot path, and compared.

One thread of low priority per model, before it a short queue. When the queue or the rate is full the sample is dropped
and counted, not waited for.
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
from collections.abc import Callable, Sequence

from bf16kit.errors import Bf16kitError
from bf16kit.runtime import Runtime
from bf16kit.tensors import TensorSpec
from bf16kit.wording import brief
from service.drift.comparison import Comparison
from service.drift.observer import ShadowObserver
from service.drift.policy import ShadowPolicy
from service.drift.sampling import Chooser, Sample, TokenBucket
from service.request import Reply, Request

_log = logging.getLogger(__name__)
QUEUE_SIZE = 8
LONGEST_RUN_S = 60.0  # of the reference; what takes longer measures nothing that anybody waits for
# Not 19: this thread holds Python's lock for a moment now and then, and one that the kernel never schedules would hold
# it for long while request threads wait.
NICENESS = 10


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
        inputs: Sequence[TensorSpec] = (),
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._load = load
        self._comparison = comparison
        self._policy = policy
        self._observer = observer
        self._name = name
        self._chooser = Chooser(policy, observer, batch_axis, draw, inputs)
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
            self._chooser.sampled("dropped", sample.rows)

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
