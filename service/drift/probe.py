"""Runs sampled rows on bf16 while fp32 answers, so that bf16's drift is still measured and it can take over again."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from bf16kit.messages.errors import Bf16kitError
from bf16kit.messages.wording import brief
from service.contract import Array
from service.drift.backgroundqueue import BackgroundQueue
from service.drift.observer import OutcomeObserver
from service.drift.sampling import Sample, SampleSender, size_of
from service.drift.shadow import QUEUE_SIZE, lower_priority

_log = logging.getLogger(__name__)
Run = Callable[[Mapping[str, Array], Sequence[str]], tuple[dict[str, Array], str]]
_Item = tuple[Sample, OutcomeObserver]


class Probe:
    """A :class:`~service.drift.sampling.SampleSender` in front of another, which replaces outputs of another precision.

    Samples of ``precision`` are passed on unchanged. For other samples ``run`` computes the outputs again, on a
    low-priority thread that starts when it is first needed. Samples that find no room are dropped: ``max_bytes``
    bounds those that wait.
    """

    def __init__(self, name: str, precision: str, run: Run, sender: SampleSender, max_bytes: int) -> None:
        self._name = name
        self._precision = precision
        self._run = run
        self._sender = sender
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._bytes_in_use = 0
        self._queue = BackgroundQueue[_Item](
            f"{name}-probe", self._process, max_waiting=QUEUE_SIZE, max_batch=1, on_start=lower_priority
        )

    def send(self, sample: Sample, observer: OutcomeObserver) -> None:
        """See :meth:`service.drift.sampling.SampleSender.send`."""
        if sample.precision == self._precision:
            self._sender.send(sample, observer)
        elif not self._enqueue(sample, observer):
            observer.sampled("dropped", sample.rows)

    def finish(self) -> None:
        """See :meth:`service.drift.sampling.SampleSender.finish`."""
        self._sender.finish()

    def stop(self) -> None:
        """Start no further work, and drop the waiting samples. Does not wait for work in progress."""
        for sample, observer in self._queue.end():
            observer.sampled("dropped", sample.rows)

    def close(self, deadline: float = math.inf) -> bool:
        """End the thread. False when it still runs at ``deadline``, in :func:`time.monotonic` seconds."""
        self.stop()
        return self._queue.join(deadline)

    def _enqueue(self, sample: Sample, observer: OutcomeObserver) -> bool:
        with self._lock:
            if self._bytes_in_use + sample.nbytes > self._max_bytes:
                return False
            self._bytes_in_use += sample.nbytes
        queued = False
        try:
            queued = self._queue.put((sample, observer))
        except RuntimeError as error:  # the system has no thread left; the client gets its response all the same
            _log.warning("%s: a sample that fp32 answered cannot be run on bf16: %s", self._name, error)
        if not queued:
            self._release(sample)
        return queued

    def _release(self, sample: Sample) -> None:
        with self._lock:
            self._bytes_in_use -= sample.nbytes

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _process(self, items: Sequence[_Item]) -> None:
        for sample, observer in items:
            self._measure(sample, observer)
            self._release(sample)

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
            self._sender.send(replace(sample, outputs=outputs, nbytes=nbytes, precision=precision), observer)
