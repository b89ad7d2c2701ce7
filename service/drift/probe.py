"""While fp32 answers, bf16 runs the sampled rows beside it: its drift is measured on, or nobody could return to it."""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from bf16kit.errors import Bf16kitError
from bf16kit.wording import brief
from service.contract import Array
from service.drift.observer import OutcomeObserver
from service.drift.sampling import Hand, Sample, size_of
from service.drift.shadow import QUEUE_SIZE, lower_priority

_log = logging.getLogger(__name__)
Run = Callable[[Mapping[str, Array], Sequence[str]], tuple[dict[str, Array], str]]


class Probe:
    """A :class:`~service.drift.sampling.Hand` before another: samples of ``precision`` pass as they are, others with
    the outputs that ``run`` makes instead, on a thread of low priority, which is there once it is needed. What finds
    no room is dropped; ``most_bytes`` bounds the samples that wait.
    """

    def __init__(self, name: str, precision: str, run: Run, hand: Hand, most_bytes: int) -> None:
        self._name = name
        self._precision = precision
        self._run = run
        self._hand = hand
        self._most = most_bytes
        self._queue: queue.Queue[tuple[Sample, OutcomeObserver] | None] = queue.Queue(QUEUE_SIZE)
        self._lock = threading.Lock()
        self._held = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    def give(self, sample: Sample, observer: OutcomeObserver) -> None:
        """See :meth:`service.drift.sampling.Hand.give`."""
        if sample.precision == self._precision:
            self._hand.give(sample, observer)
        elif not self._keep(sample, observer):
            observer.sampled("dropped", sample.rows)

    def forget(self) -> None:
        """See :meth:`service.drift.sampling.Hand.forget`."""
        self._hand.forget()

    def stop(self) -> None:
        """Begin nothing any more; does not wait for what is at work."""
        self._closed = True
        with contextlib.suppress(queue.Full):  # then the thread is not waiting, and sees that it is closed
            self._queue.put_nowait(None)

    def close(self, deadline: float = math.inf) -> bool:
        """End the thread. False when it still runs at ``deadline``, in :func:`time.monotonic` seconds."""
        self.stop()
        if self._thread is None:
            return True
        self._thread.join(None if deadline == math.inf else max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _keep(self, sample: Sample, observer: OutcomeObserver) -> bool:
        with self._lock:
            if self._closed or self._held + sample.nbytes > self._most:
                return False
            try:
                self._queue.put_nowait((sample, observer))
            except queue.Full:
                return False
            self._held += sample.nbytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=f"{self._name}-probe", daemon=True)
                self._thread.start()
            return True

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        lower_priority()
        while (waiting := self._queue.get()) is not None and not self._closed:
            sample, observer = waiting
            self._measure(sample, observer)
            with self._lock:
                self._held -= sample.nbytes

    def _measure(self, sample: Sample, observer: OutcomeObserver) -> None:
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
            self._hand.give(replace(sample, outputs=outputs, nbytes=nbytes, precision=precision), observer)
