"""What the owner of the fallback has before it where several workers serve: it decides for all of them together."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future

from bf16kit.errors import Unavailable
from bf16kit.wording import brief
from service.drift.owner import Answers, Order
from service.peers.channel import Body
from service.request import Precision
from service.workers.changes import died
from service.workers.fleet import Fleet

_log = logging.getLogger(__name__)
_TOLD = "precision"  # a worker that is started hears of it; one that runs is asked to switch


class Workers:
    """See :class:`service.drift.owner.Servers`."""

    def __init__(self, fleet: Fleet, clock: Callable[[], float] = time.time) -> None:
        self._fleet = fleet
        self._clock = clock
        self._since: dict[tuple[str, int], float] = {}
        self._lock = threading.Lock()

    def changed(self, model: str, versions: Collection[int]) -> None:
        """All workers have loaded these versions anew, or unloaded them: what was ordered of them is over. Others
        answer on as they did."""
        now = self._clock()
        with self._lock:
            self._since |= {(model, version): now for version in versions}
        for version in versions:
            self._fleet.forget(_TOLD, f"{model}/{version}")

    def answers(self, model: str, version: int) -> Answers | None:
        wish = self._fleet.wishes.get(model)
        plan = None if wish is None else next((plan for plan in wish.plans if plan.version == version), None)
        if plan is None:
            return None
        with self._lock:
            since = self._since.get((model, version), 0.0)
        return Answers(plan.digest, since, plan.serving.fallback)

    def order(self, order: Order) -> Future[None]:
        """Ends when all have answered; it fails where none of them could do it."""
        body = order.to_json()
        self._fleet.remember(_TOLD, f"{order.model}/{order.version}", body)
        return _any_of(self._fleet.ask("switch", body), order.precision)

    def transition(self, model: str, version: int, to: Precision) -> None:
        for worker in self._fleet.running[:1]:
            self._fleet.ask_one(worker, "transition", {"model": model, "version": version, "to": to})


def _any_of(asked: Mapping[str, Future[Body]], precision: Precision) -> Future[None]:
    told: Future[None] = Future()
    left, lock = set(asked), threading.Lock()

    def hear(worker: str, done: Future[Body]) -> None:
        error = done.exception()
        # bf16 can be refused by a worker alone that has not loaded it yet, and will begin with bf16.
        if error is not None and not died(error) and precision == "fp32":
            _log.error("%s cannot answer as it was ordered to: %s", worker, brief(error))
        with lock:
            left.discard(worker)
            if left:
                return
        errors = [found for each in asked.values() if (found := each.exception()) is not None]
        if len(errors) < len(asked):
            told.set_result(None)
        else:
            told.set_exception(next((each for each in errors if not died(each)), errors[0]))

    if not asked:
        told.set_exception(Unavailable("no worker of this server is running"))
    for worker, each in asked.items():
        each.add_done_callback(lambda done, worker=worker: hear(worker, done))  # type: ignore[misc]
    return told
