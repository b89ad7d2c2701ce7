"""The counts of all processes of a server together: for ``/metrics``, the status page and ModelStatistics."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from service.contract import StatisticsSnapshot
from service.peers.channel import Body
from service.peers.peer import when_received
from service.telemetry.merged import Family, MergedMetrics, Series
from service.telemetry.metrics import Metrics, expose
from service.workers.statistics import MergedStatistics, StatisticsByVersion, from_json
from service.workers.view import Key

# Wait for the processes' current counts; of those that are late, the last report counts. A process that dies takes with
# it what it counted since the last request, which nobody has seen.
_TIMEOUT_SECONDS = 2.0
Ask = Callable[[], Mapping[str, Future[Body]]]  # returns every running process' answer, by its name


class Counting:
    """Sums the counts of all processes.

    ``own`` are this process' metrics. ``ask`` requests the counts of the others, which :meth:`receive` receives.
    """

    def __init__(self, own: Metrics, ask: Ask, wanted: Callable[[], Iterable[Key]]) -> None:
        self._own = own
        self._ask = ask
        self._metrics = MergedMetrics(lambda: [(name, str(version)) for name, version in wanted()])
        self._statistics = MergedStatistics()

    def receive(self, process: str, report: Mapping[str, Any]) -> None:
        """Take over what ``process`` has counted so far. Reports must come in the order they were sent.

        A report after a model was forgotten has metrics only.
        """
        self._metrics.update(process, map(Family.from_json, report["metrics"]), complete=report["complete"])
        if "statistics" in report:
            self._statistics.update(process, from_json(report["statistics"]))

    def process_died(self, process: str) -> None:
        """Note that the process died."""
        self._metrics.process_died(process)
        self._statistics.process_died(process)

    def forget(self, model: str, versions: Collection[int]) -> None:
        """Forget the counts of versions that all workers have reloaded or unloaded."""
        self._metrics.forget(model, versions)
        self._statistics.forget(model, versions)

    def expose(self, accept: str = "") -> tuple[bytes, str]:
        """See :meth:`Metrics.expose`; asks for current counts first."""
        self.refresh()
        return expose(self._metrics.families(), accept)

    def samples(self, names: Iterable[str]) -> Iterator[Series]:
        """See :meth:`Metrics.samples`; asks for current counts first."""
        self.refresh()
        return self._metrics.samples(names)

    def statistics(self) -> StatisticsByVersion:
        """Return current statistics."""
        self.refresh()
        return self._statistics.sum()

    def statistics_of(self, name: str, version: int) -> StatisticsSnapshot:
        """Return a version's statistics, as old as the last counts."""
        return self._statistics.of(name, version)

    def refresh(self) -> None:
        """Request every process' current counts, and wait for them."""
        counted = [when_received(answer, partial(self.receive, process)) for process, answer in self._ask().items()]
        self._metrics.update("", self._own.snapshot())
        wait(counted, _TIMEOUT_SECONDS)
