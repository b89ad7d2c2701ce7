"""What a server of one process has counted, and its shadow beside it: for ``/metrics`` and the status page."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, wait
from itertools import chain

from service.peers.channel import Body
from service.peers.peer import Message
from service.shadow.board import Key
from service.shadow.process import NAME
from service.telemetry.metrics import Metrics, expose
from service.telemetry.readings import Sample
from service.telemetry.whole import Family, Whole, added

_PATIENCE_SECONDS = 2.0  # for the shadow to tell once more when somebody asks; if it does not, what it told last counts


class CountingBoth:
    """``own`` is this process' part; ``ask`` has the shadow tell what it has counted, None where there is none;
    ``wanted`` says which versions are served."""

    def __init__(
        self, own: Metrics, ask: Callable[[], Future[Body] | None], wanted: Callable[[], Iterable[Key]]
    ) -> None:
        self._own = own
        self._ask = ask
        self._shadow = Whole(lambda: [(name, str(version)) for name, version in wanted()])

    def hear(self, told: Message) -> None:
        """What the shadow has counted until now."""
        self._shadow.update(NAME, map(Family.from_json, told.body["metrics"]))

    def lost(self) -> None:
        """It has died: what it counted stays."""
        self._shadow.lost(NAME)

    def forget(self, model: str, versions: Collection[int]) -> None:
        """They were loaded anew, or unloaded."""
        self._shadow.forget(model, versions)

    def expose(self, accept: str = "") -> tuple[bytes, str]:
        """See :meth:`Metrics.expose`; of this moment."""
        asked = self._ask()
        if asked is not None:
            wait([self._heard(asked)], _PATIENCE_SECONDS)
        measured = self._shadow.families()
        return expose(added(self._own.snapshot(), measured), accept) if measured else self._own.expose(accept)

    def samples(self, names: Iterable[str]) -> Iterator[Sample]:
        """See :meth:`Metrics.samples`; of the shadow's, those of the last second. A series may be told twice: what both
        have counted is the sum."""
        names = list(names)
        return chain(self._own.samples(names), self._shadow.samples(names))

    def _heard(self, asked: Future[Body]) -> Future[None]:
        """Ends once what the shadow has told is counted."""
        heard: Future[None] = Future()

        def hear(done: Future[Body]) -> None:
            try:
                if done.exception() is None:
                    self.hear(Message(done.result()))
            finally:
                heard.set_result(None)

        asked.add_done_callback(hear)
        return heard
