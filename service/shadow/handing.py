"""The serving process' side: sends samples to the process that leads the shadow."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property

from bf16kit.errors import Unavailable
from service.drift.late import BackgroundQueue
from service.drift.observer import Outcome, OutcomeObserver
from service.drift.sampling import Sample
from service.models.plan import DesiredModel, Plan
from service.peers.channel import Body
from service.shadow.samples import pack

_log = logging.getLogger(__name__)
TOGETHER_S = 0.05  # time that samples wait, to be sent together
_Given = tuple[Sample, OutcomeObserver]
_Told = tuple[int, OutcomeObserver]  # a sample's rows, and the observer of its outcome
Ask = Callable[[str, Mapping[str, object], list[int]], Future[Body]]


class PlanSampleSender:
    """A :class:`service.drift.sampling.SampleSender` for one model, loaded by ``plan``.

    ``ask`` sends a request to the leading process. ``gone`` is called when no more samples will come, with the model's
    name and what was loaded, as JSON. Samples are sent together a moment later, from a separate thread. The thread that
    answers a request therefore waits neither for system calls nor for Python's lock after each (docs/decisions/0055).
    """

    def __init__(
        self,
        name: str,
        plan: Plan,
        ask: Ask,
        gone: Callable[[str, str], None] = lambda name, desired: None,
        *,
        together_s: float = TOGETHER_S,
    ) -> None:
        self._name = name
        self._plan = plan
        self._ask = ask
        self._gone = gone
        self._said = False
        self._waiting = BackgroundQueue[_Given](f"{name}-samples", self._work, gather_s=together_s)

    @cached_property
    def _desired(self) -> str:
        return DesiredModel(self._name, (self._plan,)).to_json()

    def send(self, sample: Sample, observer: OutcomeObserver) -> None:
        """See :meth:`service.drift.sampling.SampleSender.send`."""
        taken = False
        try:
            taken = self._waiting.put((sample, observer))
        except RuntimeError as error:  # the system has no thread left; the client gets its response all the same
            self._say(error)
        if not taken:
            observer.sampled("dropped", sample.rows)

    def finish(self) -> None:
        """See :meth:`service.drift.sampling.SampleSender.finish`."""
        for sample, observer in self._waiting.end():
            observer.sampled("dropped", sample.rows)
        self._waiting.join()  # samples sent after gone() would have the model measured again
        self._gone(self._name, self._desired)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _work(self, given: Sequence[_Given]) -> None:
        try:
            self._send(given)
        except Exception as error:  # noqa: BLE001 -- for want of files or memory: the next are handed on
            self._say(error)
            _tell(_told(given), ["failed"] * len(given))

    def _send(self, given: Sequence[_Given]) -> None:
        told = _told(given)
        model = {"model": self._name, "version": self._plan.version, "wish": self._desired}
        body, file = pack([sample for sample, _ in given])
        try:
            asked = self._ask("samples", {**body, **model}, [file])
        finally:
            os.close(file)
        asked.add_done_callback(lambda done: _hear(told, done))

    def _say(self, error: Exception) -> None:
        """Log the first failure only: every affected sample is counted."""
        if not self._said:
            self._said = True
            _log.warning("model %r: samples for live drift cannot be handed on: %r", self._name, error)


def _told(given: Sequence[_Given]) -> list[_Told]:
    """Return rows and observers without the samples' arrays, which can be freed before the samples are measured."""
    return [(sample.rows, observer) for sample, observer in given]


def _hear(told: Sequence[_Told], done: Future[Body]) -> None:
    error = done.exception()
    if error is None:
        _tell(told, done.result()["outcomes"])
    else:  # the process died with the samples or had no file left for them; it is logged there
        _tell(told, ["failed" if isinstance(error, (Unavailable, OSError)) else "dropped"] * len(told))


def _tell(told: Sequence[_Told], outcomes: Sequence[Outcome]) -> None:
    for (rows, observer), outcome in zip(told, outcomes, strict=True):
        observer.sampled(outcome, rows)
