"""Live drift: samples of live requests are run again on the fp32 reference, and compared.

Each model has one thread with a short queue, which has a low priority once it has loaded the reference. A sample that
finds the queue full is dropped, and its ``on_outcome`` is called with that.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from bf16kit.messages.errors import Bf16kitError, Unavailable
from bf16kit.messages.wording import brief
from service.contract import Array
from service.drift.evidence import SampleComparer
from service.drift.observer import Outcome, ReferenceObserver
from service.drift.policy import ShadowPolicy
from service.drift.sampling import MAX_IN_FLIGHT, Sample

_log = logging.getLogger(__name__)
QUEUE_SIZE = MAX_IN_FLIGHT
LONGEST_RUN_S = 60.0  # of one reference run: a longer one delays other samples too much to be worth it
# A tenth of the share of a thread at 0, whatever the number of threads. With 19 or SCHED_IDLE, a full machine leaves
# next to nothing (docs/decisions/0056), and a thread that then holds Python's lock keeps others waiting for it.
NICENESS = 10

OnOutcome = Callable[[Outcome], None]
_Restart = Literal["restart"]
_RESTART: Final = "restart"


@dataclass(frozen=True, slots=True)
class _QueuedSample:
    sample: Sample
    on_outcome: OnOutcome


class Reference(Protocol):
    """The model in fp32, wherever it runs: the part of :class:`bf16kit.runtime.Runtime` that the shadow needs.

    ``up``: whether it answers, which may change with each run. It logs such a change itself.
    """

    @property
    def up(self) -> bool: ...

    def run(self, feeds: Mapping[str, Array], outputs: Sequence[str], *, seconds: float) -> dict[str, Array]:
        """Raises Unavailable while it is not up, and RuntimeFailure if it fails on these inputs."""

    def close(self) -> None: ...


class Shadow:
    """Measures one model's samples. :meth:`start` loads the reference in the background; :meth:`close` ends the thread.

    ``on_measured`` is called on that thread after each measured sample.
    """

    def __init__(
        self,
        load: Callable[[], Reference],
        comparison: SampleComparer,
        policy: ShadowPolicy,
        observer: ReferenceObserver,
        *,
        name: str,
        on_measured: Callable[[], object] = lambda: None,
    ) -> None:
        self._load = load
        self._comparison = comparison
        self._max_bytes = policy.max_bytes
        self._observer = observer
        self._name = name
        self._on_measured = on_measured
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._queue: deque[_QueuedSample | _Restart] = deque()
        self._samples = 0  # samples in the queue
        self._bytes_in_use = 0  # bytes of the samples that wait or are measured
        self._closed = False
        self._up = False
        self._thread = threading.Thread(target=self._work, name=f"{name}-shadow", daemon=True)

    def start(self) -> None:
        if self._thread.ident is None and not self._closed:
            self._thread.start()

    def put(self, sample: Sample, on_outcome: OnOutcome) -> None:
        """Queue a sample. ``on_outcome`` is called with its outcome, on any thread: "dropped" if there is no room."""
        with self._lock:
            room = self._samples < QUEUE_SIZE and self._bytes_in_use + sample.nbytes <= self._max_bytes
            if queued := room and not self._closed:
                self._bytes_in_use += sample.nbytes
                self._samples += 1
                self._queue.append(_QueuedSample(sample, on_outcome))
                self._wake.notify()
        if not queued:
            on_outcome("dropped")

    def restart(self) -> None:
        """Forget recent drift once the samples queued so far are measured: another precision answers from now on."""
        with self._lock:
            self._queue.append(_RESTART)
            self._wake.notify()

    def stop(self) -> None:
        """Tell the thread to end after its current sample. Does not wait for it."""
        with self._lock:
            self._closed = True
            dropped = [each for each in self._queue if each != _RESTART]
            self._queue.clear()
            self._wake.notify()
        for each in dropped:
            each.on_outcome("dropped")

    def close(self, deadline: float = math.inf) -> bool:
        """End the thread. Return False if it still runs at ``deadline``, in :func:`time.monotonic` seconds.

        It is then left behind: a daemon thread in native code cannot be interrupted.
        """
        self.stop()
        if self._thread.ident is None:
            return True
        self._thread.join(None if deadline == math.inf else max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    # --- the shadow's thread ------------------------------------------------------------------------------------------

    def _work(self) -> None:
        reference = None if self._closed else self._load_reference()
        lower_priority()  # not before: a full machine would load for minutes, and niceness cannot be taken back
        while (item := self._next()) is not None:
            if item == _RESTART:
                self._comparison.restart()
                continue
            outcome = self._measure(reference, item.sample)
            with self._lock:
                self._bytes_in_use -= item.sample.nbytes
            item.on_outcome(outcome)
        if reference is not None:
            reference.close()

    def _next(self) -> _QueuedSample | _Restart | None:
        """Return the oldest item of the queue; None once the shadow is closed."""
        with self._wake:
            self._wake.wait_for(lambda: self._queue or self._closed)
            if self._closed:
                return None
            first = self._queue.popleft()
            self._samples -= first != _RESTART
            return first

    def _load_reference(self) -> Reference | None:
        start = time.monotonic()
        try:
            reference = self._load()
        except Exception as error:  # noqa: BLE001 - the model serves without a reference too, and the error is logged
            reason = str(error) if isinstance(error, Bf16kitError) else repr(error)
            _log.error("%s: no live drift: the fp32 reference cannot be loaded: %s", self._name, reason)
            return None
        if reference.up:
            _log.info("%s: live drift on: fp32 reference loaded in %.1f s", self._name, time.monotonic() - start)
        self._report_up(reference.up)
        return reference

    def _report_up(self, up: bool) -> None:
        if up != self._up:
            self._up = up
            self._observer.reference_up(up)

    def _measure(self, reference: Reference | None, sample: Sample) -> Outcome:
        if reference is None:
            return "failed"
        try:
            return self._compare(reference, sample)
        finally:
            self._report_up(reference.up)

    def _compare(self, reference: Reference, sample: Sample) -> Outcome:
        try:
            expected = reference.run(sample.feeds, tuple(sample.outputs), seconds=LONGEST_RUN_S)
            if not self._comparison.observe(expected, sample, self._observer):
                return "failed"  # counted apart as well: bf16kit_drift_reference_nonfinite_total
        except Unavailable:  # the reference logs this itself, once and not for each sample
            return "failed"
        except Bf16kitError as error:
            _log.error("%s: a shadow sample failed: %s", self._name, brief(error))
            return "failed"
        except Exception:  # noqa: BLE001 - one sample that fails must not end the measuring
            _log.exception("%s: a shadow sample failed", self._name)
            return "failed"
        self._observer.last_sample(time.time())
        self._on_measured()
        return "measured"


def lower_priority() -> None:
    """Lower the calling thread's priority (on Linux, of it alone, and of the threads that it starts)."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
