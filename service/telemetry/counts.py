"""The counts of all processes of a server together: for ``/metrics``, the status page and ModelStatistics."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from service.contract import StatisticsSnapshot
from service.peers.channel import Body
from service.peers.peer import when_received
from service.telemetry.metrics import Metrics, Sample, samples
from service.telemetry.values import Values, fell, from_message, merge, model_of

# Wait for the processes' current counts; of those that are late, the last report counts.
ANSWER_SECONDS = 2.0
Version = tuple[str, int]  # a model's name and version
Ask = Callable[[], Mapping[str, Future[Body]]]  # returns every other process' answer, by its name


class Counting:
    """Adds up the counts of all processes when somebody reads them.

    ``own`` are this process' metrics. ``ask`` requests the counts of the others, which :meth:`receive` receives.
    ``served`` returns the versions that are served. When a process dies, its gauges disappear. What it had counted
    until its last report stays, so that no counter falls; what it counted after that is lost.
    """

    def __init__(self, own: Metrics, ask: Ask, served: Callable[[], Iterable[Version]]) -> None:
        self._own = own
        self._ask = ask
        self._served = served
        self._lock = threading.Lock()
        self._latest: dict[str, Values] = {}  # by process
        self._kept: Values = {}  # counts of processes that died, and of versions that a process has loaded anew

    def receive(self, process: str, report: Mapping[str, Any]) -> None:
        """Take over what ``process`` has counted so far. Reports must come in the order they were sent."""
        newest = from_message(report["metrics"])
        with self._lock:
            self._kept = merge([self._kept, fell(self._latest.get(process, {}), newest)])
            self._latest[process] = newest

    def process_died(self, process: str) -> None:
        """Note that the process died. Its counts are kept."""
        with self._lock:
            self._kept = merge([self._kept, fell(self._latest.pop(process, {}), {})])

    def forget(self, model: str, versions: Collection[int]) -> None:
        """Forget the counts of versions that all processes have reloaded or unloaded, which start anew."""
        gone = {(model, str(version)) for version in versions}
        with self._lock:
            self._kept = {key: value for key, value in self._kept.items() if model_of(key) not in gone}

    def expose(self, accept: str = "") -> tuple[bytes, str]:
        """See :meth:`Metrics.expose`; asks for current counts first."""
        return self._own.expose(accept, self._values())

    def samples(self) -> Iterator[Sample]:
        """Yield all current samples; asks for current counts first."""
        return samples(self._values())

    def statistics(self) -> Mapping[Version, StatisticsSnapshot]:
        """Return the statistics of every version; asks for current ones first."""
        found = self._values().items()
        return {(key[1], int(key[2])): value for key, value in found if isinstance(value, StatisticsSnapshot)}

    def _values(self) -> Values:
        wait(
            [when_received(answer, partial(self.receive, process)) for process, answer in self._ask().items()],
            ANSWER_SECONDS,
        )
        with self._lock:
            live = {model_of(key) for values in self._latest.values() for key in values}
            known = live | {None} | {(name, str(version)) for name, version in self._served()}
            self._kept = {key: value for key, value in self._kept.items() if model_of(key) in known}
            return merge([self._own.values(), self._kept, *self._latest.values()])
