"""The metrics of a one-process server together with its shadow's: for ``/metrics`` and the status page."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, wait
from itertools import chain

from service.peers.channel import Body
from service.peers.peer import Message, when_received
from service.shadow.process import NAME, Key
from service.telemetry.merged import Family, MergedMetrics, Series, merge
from service.telemetry.metrics import Metrics, expose

_TIMEOUT_SECONDS = 2.0  # wait for the shadow's current counts; without them its last ones are used


class CombinedMetrics:
    """This process' metrics and the shadow's.

    ``own`` holds this process' metrics. ``ask_shadow`` asks the shadow for its counts; it returns None if there is no
    shadow. ``served`` returns the versions that are served.
    """

    def __init__(
        self, own: Metrics, ask_shadow: Callable[[], Future[Body] | None], served: Callable[[], Iterable[Key]]
    ) -> None:
        self._own = own
        self._ask_shadow = ask_shadow
        self._shadow = MergedMetrics(lambda: [(name, str(version)) for name, version in served()])

    def receive(self, report: Message) -> None:
        """Take over what the shadow has counted so far."""
        body = report.body
        self._shadow.update(NAME, map(Family.from_json, body["metrics"]), complete=body["complete"])

    def process_died(self) -> None:
        """Note that the shadow died. Its counts are kept."""
        self._shadow.process_died(NAME)

    def forget(self, model: str, versions: Collection[int]) -> None:
        """Forget the counts of versions that were reloaded or unloaded."""
        self._shadow.forget(model, versions)

    def expose(self, accept: str = "") -> tuple[bytes, str]:
        """See :meth:`Metrics.expose`; asks the shadow for its current counts first."""
        self._refresh()
        return expose(merge(self._own.snapshot(), self._shadow.families()), accept)

    def samples(self, names: Iterable[str]) -> Iterator[Series]:
        """See :meth:`Metrics.samples`; asks the shadow for its current counts first.

        A series may appear twice if both count it; its value is the sum.
        """
        self._refresh()
        names = list(names)
        return chain(self._own.samples(names), self._shadow.samples(names))

    def _refresh(self) -> None:
        request = self._ask_shadow()
        if request is not None:
            wait([when_received(request, lambda body: self.receive(Message(body)))], _TIMEOUT_SECONDS)
