"""The serving process' side: sends samples to the process that leads the shadow."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from bf16kit.messages.errors import Unavailable
from service.drift.backgroundqueue import BackgroundQueue
from service.drift.observer import Outcome, OutcomeObserver
from service.drift.sampling import Sample
from service.models.plan import Plan
from service.peers.channel import Body
from service.shadow.samples import pack

_log = logging.getLogger(__name__)
GATHER_S = 0.05  # time that samples wait, to be sent together
_Item = tuple[Sample, OutcomeObserver]
_PendingOutcome = tuple[int, OutcomeObserver]  # a sample's rows, and the observer of its outcome
Ask = Callable[[str, Mapping[str, object], list[int]], Future[Body]]


class PlanSampleSender:
    """A :class:`service.drift.sampling.SampleSender` for one model, loaded by ``plan``.

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
        self._logged = False
        self._queue = BackgroundQueue[_Item](f"{name}-samples", self._process, gather_s=gather_s)

    def send(self, sample: Sample, observer: OutcomeObserver) -> None:
        """See :meth:`service.drift.sampling.SampleSender.send`."""
        queued = False
        try:
            queued = self._queue.put((sample, observer))
        except RuntimeError as error:  # the system has no thread left; the client gets its response all the same
            self._log_first(error)
        if not queued:
            observer.sampled("dropped", sample.rows)

    def finish(self) -> None:
        """See :meth:`service.drift.sampling.SampleSender.finish`."""
        for sample, observer in self._queue.end():
            observer.sampled("dropped", sample.rows)
        self._queue.join()  # samples sent after on_finish() would have the model measured again
        self._on_finish(self._name, self._plan.digest)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _process(self, items: Sequence[_Item]) -> None:
        try:
            self._send(items)
        except Exception as error:  # noqa: BLE001 -- for want of files or memory: the next are handed on
            self._log_first(error)
            _report(_without_arrays(items), ["failed"] * len(items))

    def _send(self, items: Sequence[_Item]) -> None:
        pending = _without_arrays(items)
        model = {"model": self._name, "version": self._plan.version, "plan": self._plan.digest}
        body, file = pack([sample for sample, _ in items])
        try:
            response = self._ask("samples", {**body, **model}, [file])
        finally:
            os.close(file)
        response.add_done_callback(lambda done: _on_response(pending, done))

    def _log_first(self, error: Exception) -> None:
        """Log the first failure only: every affected sample is counted."""
        if not self._logged:
            self._logged = True
            _log.warning("model %r: samples for live drift cannot be handed on: %r", self._name, error)


def _without_arrays(items: Sequence[_Item]) -> list[_PendingOutcome]:
    """Return rows and observers without the samples' arrays, which can be freed before the samples are measured."""
    return [(sample.rows, observer) for sample, observer in items]


def _on_response(pending: Sequence[_PendingOutcome], done: Future[Body]) -> None:
    error = done.exception()
    if error is None:
        _report(pending, done.result()["outcomes"])
    else:  # the process died with the samples or had no file left for them; it is logged there
        _report(pending, ["failed" if isinstance(error, (Unavailable, OSError)) else "dropped"] * len(pending))


def _report(pending: Sequence[_PendingOutcome], outcomes: Sequence[Outcome]) -> None:
    for (rows, observer), outcome in zip(pending, outcomes, strict=True):
        observer.sampled(outcome, rows)
