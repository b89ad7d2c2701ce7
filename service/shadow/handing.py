"""The side of a process that serves: it takes samples to whoever leads the process with the references."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property

from bf16kit.errors import Unavailable
from service.drift.observer import Outcome, OutcomeObserver
from service.drift.sampling import Sample
from service.models.plan import Plan, Wish
from service.peers.channel import Body
from service.shadow.samples import pack

TOGETHER_S = 0.05  # so long samples wait for others to go with
_Given = tuple[Sample, OutcomeObserver]
_Told = tuple[int, OutcomeObserver]  # a sample's rows, and who asks what became of them
Ask = Callable[[str, Mapping[str, object], list[int]], Future[Body]]


class PlannedHand:
    """See :class:`service.drift.sampling.Hand`; of a model's name and what was loaded of it.

    ``ask`` is that of whoever leads; ``gone`` is told the model's name, and what was loaded as JSON, when no more will
    come. What is given goes a moment later, together, from a thread of its own: the thread that answers a request does
    not wait for the system, nor for Python's lock after each of its calls (docs/decisions/0055).
    """

    def __init__(self, name: str, plan: Plan, ask: Ask, gone: Callable[[str, str], None] = lambda name, wish: None):
        self._name = name
        self._plan = plan
        self._ask = ask
        self._gone = gone
        self._given: list[_Given] = []
        self._wake = threading.Condition()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"{name}-samples", daemon=True)

    @cached_property
    def _wish(self) -> str:
        return Wish(self._name, (self._plan,)).to_json()

    def give(self, sample: Sample, observer: OutcomeObserver) -> None:
        """See :meth:`service.drift.sampling.Hand.give`."""
        with self._wake:
            if ended := self._ended.is_set():
                pass
            elif not self._given:  # the thread waits for the first, and for no other
                if self._thread.ident is None:
                    self._thread.start()
                self._wake.notify()
            if not ended:
                self._given.append((sample, observer))
        if ended:
            observer.sampled("dropped", sample.rows)

    def forget(self) -> None:
        """See :meth:`service.drift.sampling.Hand.forget`."""
        with self._wake:
            self._ended.set()
            self._wake.notify()
            given, self._given = self._given, []
        for sample, observer in given:
            observer.sampled("dropped", sample.rows)
        self._gone(self._name, self._wish)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._given or self._ended.is_set())
            if self._ended.wait(TOGETHER_S):
                return
            with self._wake:
                given, self._given = self._given, []
            if given:
                self._send(given)

    def _send(self, given: Sequence[_Given]) -> None:
        told = [(sample.rows, observer) for sample, observer in given]  # without their arrays, till they are measured
        model = {"model": self._name, "version": self._plan.version, "wish": self._wish}
        try:
            body, file = pack([sample for sample, _ in given])
            try:
                asked = self._ask("samples", {**body, **model}, [file])
            finally:
                os.close(file)
        except OSError:  # for want of files or memory
            _tell(told, ["failed"] * len(told))
            return
        asked.add_done_callback(lambda done: _hear(told, done))


def _hear(told: Sequence[_Told], done: Future[Body]) -> None:
    error = done.exception()
    if error is None:
        _tell(told, done.result()["outcomes"])
    else:  # the process died with them, which is no news here
        _tell(told, ["failed" if isinstance(error, Unavailable) else "dropped"] * len(told))


def _tell(told: Sequence[_Told], outcomes: Sequence[Outcome]) -> None:
    for (rows, observer), outcome in zip(told, outcomes, strict=True):
        observer.sampled(outcome, rows)
