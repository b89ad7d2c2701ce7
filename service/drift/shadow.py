"""Live drift: samples of live requests are run again on the fp32 reference, and compared.

One thread of low priority per model, before it a short queue. When the queue is full the sample is dropped, not waited
for; whoever put it there is told what became of it.
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

from bf16kit.errors import Bf16kitError, Unavailable
from bf16kit.wording import brief
from service.contract import Array
from service.drift.evidence import Comparing
from service.drift.observer import Outcome, ReferenceObserver
from service.drift.policy import ShadowPolicy
from service.drift.sampling import MOST_WAITING, Sample

_log = logging.getLogger(__name__)
QUEUE_SIZE = MOST_WAITING
LONGEST_RUN_S = 60.0  # of the reference; what takes longer measures nothing that anybody waits for
# Not 19: this thread holds Python's lock for a moment now and then, and one that the kernel never schedules would hold
# it for long while request threads wait.
NICENESS = 10

Told = Callable[[Outcome], None]
_Restart = Literal["restart"]
_RESTART: Final = "restart"


@dataclass(frozen=True, slots=True)
class _Waiting:
    sample: Sample
    told: Told


class Reference(Protocol):
    """The model in fp32, wherever it runs: as much of :class:`bf16kit.runtime.Runtime` as is needed of one.

    ``up``: whether it answers. It may stop, or begin to, with each run. It says so in the log itself.
    """

    @property
    def up(self) -> bool: ...

    def run(self, feeds: Mapping[str, Array], outputs: Sequence[str], *, seconds: float) -> dict[str, Array]:
        """Raises Unavailable while it is not up, RuntimeFailure where it fails on these inputs."""

    def close(self) -> None: ...


class Shadow:
    """:meth:`start` loads the reference in the background, once; :meth:`close` ends the thread.

    ``measured`` is called on that thread after every sample that was.
    """

    def __init__(
        self,
        load: Callable[[], Reference],
        comparison: Comparing,
        policy: ShadowPolicy,
        observer: ReferenceObserver,
        *,
        name: str,
        measured: Callable[[], object] = lambda: None,
    ) -> None:
        self._load = load
        self._comparison = comparison
        self._most = policy.max_bytes
        self._observer = observer
        self._name = name
        self._measured = measured
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._waiting: deque[_Waiting | _Restart] = deque()
        self._samples = 0  # of those that wait
        self._held = 0  # bytes of the samples that wait or are measured
        self._closed = False
        self._up = False
        self._thread = threading.Thread(target=self._work, name=f"{name}-shadow", daemon=True)

    def start(self) -> None:
        if self._thread.ident is None and not self._closed:
            self._thread.start()

    def put(self, sample: Sample, told: Told) -> None:
        """Measure it; ``told`` hears, on any thread, what became of it: dropped where there is no room."""
        with self._lock:
            room = self._samples < QUEUE_SIZE and self._held + sample.nbytes <= self._most
            if taken := room and not self._closed:
                self._held += sample.nbytes
                self._samples += 1
                self._waiting.append(_Waiting(sample, told))
                self._wake.notify()
        if not taken:
            told("dropped")

    def restart(self) -> None:
        """Forget recent drift, once what was put before is measured: what follows was answered by another precision."""
        with self._lock:
            self._waiting.append(_RESTART)
            self._wake.notify()

    def stop(self) -> None:
        """Tell the thread to end after the sample it is at; does not wait for it."""
        with self._lock:
            self._closed = True
            left = [each for each in self._waiting if each != _RESTART]
            self._waiting.clear()
            self._wake.notify()
        for each in left:
            each.told("dropped")

    def close(self, deadline: float = math.inf) -> bool:
        """End the thread. False when it still runs at ``deadline``, in :func:`time.monotonic` seconds: it is left
        behind, a daemon inside native code that nothing can interrupt."""
        self.stop()
        if self._thread.ident is None:
            return True
        self._thread.join(None if deadline == math.inf else max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    # --- the shadow's thread ------------------------------------------------------------------------------------------

    def _work(self) -> None:
        lower_priority()  # before loading: the threads that a session starts inherit it
        reference = None if self._closed else self._loaded()
        while (waiting := self._next()) is not None:
            if waiting == _RESTART:
                self._comparison.restart()
                continue
            outcome = self._measure(reference, waiting.sample)
            with self._lock:
                self._held -= waiting.sample.nbytes
            waiting.told(outcome)
        if reference is not None:
            reference.close()

    def _next(self) -> _Waiting | _Restart | None:
        """What was put first of all that waits; None once this is closed."""
        with self._wake:
            self._wake.wait_for(lambda: self._waiting or self._closed)
            if self._closed:
                return None
            first = self._waiting.popleft()
            self._samples -= first != _RESTART
            return first

    def _loaded(self) -> Reference | None:
        begun = time.monotonic()
        try:
            reference = self._load()
        except Exception as error:  # noqa: BLE001 - without a reference the model still serves, and says so
            reason = str(error) if isinstance(error, Bf16kitError) else repr(error)
            _log.error("%s: no live drift: the fp32 reference cannot be loaded: %s", self._name, reason)
            return None
        if reference.up:
            _log.info("%s: live drift on: fp32 reference loaded in %.1f s", self._name, time.monotonic() - begun)
        self._tell(reference.up)
        return reference

    def _tell(self, up: bool) -> None:
        if up != self._up:
            self._up = up
            self._observer.reference_up(up)

    def _measure(self, reference: Reference | None, sample: Sample) -> Outcome:
        if reference is None:
            return "failed"
        try:
            return self._compare(reference, sample)
        finally:
            self._tell(reference.up)

    def _compare(self, reference: Reference, sample: Sample) -> Outcome:
        try:
            expected = reference.run(sample.feeds, tuple(sample.outputs), seconds=LONGEST_RUN_S)
            self._comparison.observe(expected, sample, self._observer)
        except Unavailable:  # of which the log has one line, and not one for each sample
            return "failed"
        except Bf16kitError as error:
            _log.error("%s: a shadow sample failed: %s", self._name, brief(error))
            return "failed"
        except Exception:  # noqa: BLE001 - one sample that fails must not end the measuring
            _log.exception("%s: a shadow sample failed", self._name)
            return "failed"
        self._observer.last_sample(time.time())
        self._measured()
        return "measured"


def lower_priority() -> None:
    """Run the calling thread (on Linux, it alone) after everything else that wants the processor."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
