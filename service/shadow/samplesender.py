"""The serving process' side: sends samples to the process that leads the shadow."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from bf16kit.messages.errors import Unavailable
from service.drift.sampler import Outcome, OutcomeObserver, Sample
from service.models.plan import Plan
from service.peers.channel import Body
from service.shadow.samples import pack

_log = logging.getLogger(__name__)
GATHER_S = 0.05  # time that samples wait, to be sent together
_Item = tuple[Sample, OutcomeObserver]
_Pending = Sequence[tuple[int, OutcomeObserver]]  # samples' rows, and the observers of their outcomes
Ask = Callable[[str, Mapping[str, object], list[int]], Future[Body]]


class PlanSampleSender:
    """A :class:`service.drift.forwarder.SampleSender` for one model, loaded by ``plan``.

    ``ask`` sends a request to the leading process. ``on_finish`` is called when no more samples will come, with the
    model's name and the plan's digest. Samples are sent together a moment later, from a separate thread. The
    thread that answers a request therefore waits neither for system calls nor for Python's lock after each
    (docs/decisions/0055).
    """

    def __init__(
        self,
        name: str,
        plan: Plan,
        ask: Ask,
        on_finish: Callable[[str, str], None] = lambda name, plan: None,
        *,
        gather_s: float = GATHER_S,
    ) -> None:
        self._name = name
        self._plan = plan
        self._ask = ask
        self._on_finish = on_finish
        self._gather_s = gather_s
        self._logged = False
        self._lock = threading.Lock()  # guards what waits
        self._waiting: list[_Item] = []
        self._ended = threading.Event()
        self._thread = ThreadPoolExecutor(1, f"{name}-samples")

    def send(self, sample: Sample, observer: OutcomeObserver) -> None:
        """See :meth:`service.drift.forwarder.SampleSender.send`."""
        with self._lock:
            if not (ended := self._ended.is_set()):
                self._waiting.append((sample, observer))
            first = len(self._waiting) == 1  # those that follow within a moment are sent with it
        if ended:
            observer.sampled("dropped", sample.rows)
        elif first:
            try:
                self._thread.submit(self._send_waiting)
            except RuntimeError as error:  # no thread is left, or finish() was called; the client gets its response
                self._log_first(error)
                self._drop_waiting()

    def finish(self) -> None:
        """See :meth:`service.drift.forwarder.SampleSender.finish`."""
        with self._lock:
            self._ended.set()
        self._drop_waiting()
        self._thread.shutdown()  # samples sent after on_finish() would have the model measured again
        self._on_finish(self._name, self._plan.digest)

    def _take(self) -> list[_Item]:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        return waiting

    def _drop_waiting(self) -> None:
        for sample, observer in self._take():
            observer.sampled("dropped", sample.rows)

    def _send_waiting(self) -> None:
        """Send what waits, on the thread. Samples that cannot be sent count as failed."""
        self._ended.wait(self._gather_s)
        items = self._take()
        if not items:
            return
        pending = [(sample.rows, observer) for sample, observer in items]  # without arrays, which can be freed
        try:
            model = {"model": self._name, "version": self._plan.version, "plan": self._plan.digest}
            body, file = pack([sample for sample, _ in items])
            try:
                response = self._ask("samples", {**body, **model}, [file])
            finally:
                os.close(file)
            response.add_done_callback(lambda done: _on_response(pending, done))
        except Exception as error:  # noqa: BLE001 -- for want of files or memory: the next are handed on
            self._log_first(error)
            _report(pending, ["failed"] * len(pending))

    def _log_first(self, error: Exception) -> None:
        """Log the first failure only: every affected sample is counted."""
        if not self._logged:
            self._logged = True
            _log.warning("model %r: samples for live drift cannot be handed on: %r", self._name, error)


def _on_response(pending: _Pending, done: Future[Body]) -> None:
    error = done.exception()
    if error is None:
        _report(pending, done.result()["outcomes"])
    else:  # the process died with the samples or had no file left for them; it is logged there
        _report(pending, ["failed" if isinstance(error, (Unavailable, OSError)) else "dropped"] * len(pending))


def _report(pending: _Pending, outcomes: Sequence[Outcome]) -> None:
    for (rows, observer), outcome in zip(pending, outcomes, strict=True):
        observer.sampled(outcome, rows)
