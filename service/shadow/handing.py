"""The side of a process that serves: it takes samples to whoever leads the process with the references."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import cached_property

from bf16kit.errors import Unavailable
from service.drift.observer import OutcomeObserver
from service.drift.sampling import Sample
from service.models.plan import Plan, Wish
from service.peers.channel import Body
from service.shadow.samples import pack

Ask = Callable[[str, Mapping[str, object], list[int]], Future[Body]]


class PlannedHand:
    """See :class:`service.drift.sampling.Hand`; of a model's name and what was loaded of it.

    ``ask`` is that of whoever leads; ``gone`` is told the model's name, and what was loaded as JSON, when no more will
    come.
    """

    def __init__(self, name: str, plan: Plan, ask: Ask, gone: Callable[[str, str], None] = lambda name, wish: None):
        self._name = name
        self._plan = plan
        self._ask = ask
        self._gone = gone

    @cached_property
    def _wish(self) -> str:
        return Wish(self._name, (self._plan,)).to_json()

    def give(self, sample: Sample, observer: OutcomeObserver) -> None:
        """See :meth:`service.drift.sampling.Hand.give`."""
        rows = sample.rows  # and not the sample, which would stay in memory here until it is measured there
        model = {"model": self._name, "version": self._plan.version, "wish": self._wish}
        try:
            body, file = pack(sample)
            try:
                asked = self._ask("sample", {**body, **model}, [file])
            finally:
                os.close(file)
        except OSError:  # for want of files or memory: the request has its answer, and does not fail for its sample
            observer.sampled("failed", rows)
            return

        def told(done: Future[Body]) -> None:
            error = done.exception()
            if error is None:
                observer.sampled(done.result()["outcome"], rows)
            else:  # the process died with it, which is no news here
                observer.sampled("failed" if isinstance(error, Unavailable) else "dropped", rows)

        asked.add_done_callback(told)

    def forget(self) -> None:
        """See :meth:`service.drift.sampling.Hand.forget`."""
        self._gone(self._name, self._wish)
