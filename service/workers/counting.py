"""What all processes of a server have counted, together: for ``/metrics``, the status page and ModelStatistics."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from typing import Any

from service.contract import StatisticsSnapshot
from service.peers.channel import Body
from service.telemetry.metrics import Metrics, expose
from service.telemetry.whole import Family, Series, Whole
from service.workers.statistics import Told, WholeStatistics, from_json
from service.workers.view import Key

_PATIENCE_SECONDS = 2.0  # for processes to tell once more when somebody asks; of those that do not, the last counts
Ask = Callable[[], Mapping[str, Future[Body]]]  # every process that runs, by its name


class Counting:
    """``own`` is this process' part of it; ``ask`` has all others tell what they have counted, see :meth:`hear`."""

    def __init__(self, own: Metrics, ask: Ask, wanted: Callable[[], Iterable[Key]]) -> None:
        self._own = own
        self._ask = ask
        self._metrics = Whole(lambda: [(name, str(version)) for name, version in wanted()])
        self._statistics = WholeStatistics()

    def hear(self, process: str, told: Mapping[str, Any]) -> None:
        """What ``process`` has counted until now, in the order in which it told."""
        self._metrics.update(process, map(Family.from_json, told["metrics"]))
        self._statistics.update(process, from_json(told["statistics"]))

    def lost(self, process: str) -> None:
        """It has died."""
        self._metrics.lost(process)
        self._statistics.lost(process)

    def forget(self, model: str, versions: Collection[int]) -> None:
        """They were loaded anew everywhere, or unloaded."""
        self._metrics.forget(model, versions)
        self._statistics.forget(model, versions)

    def expose(self, accept: str = "") -> tuple[bytes, str]:
        """See :meth:`Metrics.expose`; of this moment."""
        self.refresh()
        return expose(self._metrics.families(), accept)

    def samples(self, names: Iterable[str]) -> Iterator[Series]:
        """See :meth:`Metrics.samples`; of the last second."""
        self._metrics.update("", self._own.snapshot())
        return self._metrics.samples(names)

    def statistics(self) -> Told:
        """Of this moment."""
        self.refresh()
        return self._statistics.sum()

    def statistics_of(self, name: str, version: int) -> StatisticsSnapshot:
        """Of the last second."""
        return self._statistics.of(name, version)

    def refresh(self) -> None:
        """Have every process tell once more."""
        heard = [self._hearing(process, told) for process, told in self._ask().items()]
        self._metrics.update("", self._own.snapshot())
        wait(heard, _PATIENCE_SECONDS)

    def _hearing(self, process: str, told: Future[Body]) -> Future[None]:
        """Ends once what ``process`` has told is counted."""
        heard: Future[None] = Future()

        def hear(done: Future[Body]) -> None:
            try:
                if done.exception() is None:
                    self.hear(process, done.result())
            finally:
                heard.set_result(None)

        told.add_done_callback(hear)
        return heard
