"""The workers as the owner of the fallback sees them: it decides for all of them together."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future

from bf16kit.messages.errors import Unavailable
from bf16kit.messages.wording import brief
from service.drift.fallbackcontroller import ActivePlan, PrecisionOrder
from service.peers.channel import Body
from service.request import Precision
from service.workers.changes import died
from service.workers.fleet import Fleet

_log = logging.getLogger(__name__)
_REMEMBERED = "precision"  # sent to a worker at its start; a running one is sent "switch" instead


class WorkerProcesses:
    """A :class:`service.drift.fallbackcontroller.ServingProcesses` of several workers."""

    def __init__(self, fleet: Fleet, clock: Callable[[], float] = time.time) -> None:
        self._fleet = fleet
        self._clock = clock
        self._since: dict[tuple[str, int], float] = {}
        self._lock = threading.Lock()

    def changed(self, model: str, versions: Collection[int]) -> None:
        """Drop the orders for these versions, because all workers have reloaded or unloaded them.

        Other versions keep theirs.
        """
        now = self._clock()
        with self._lock:
            self._since |= {(model, version): now for version in versions}
        for version in versions:
            self._fleet.forget(_REMEMBERED, f"{model}/{version}")

    def active_plan(self, model: str, version: int) -> ActivePlan | None:
        desired = self._fleet.desired_models.get(model)
        plan = None if desired is None else next((plan for plan in desired.plans if plan.version == version), None)
        if plan is None:
            return None
        with self._lock:
            since = self._since.get((model, version), 0.0)
        return ActivePlan(plan.digest, since, plan.serving.fallback)

    def order(self, order: PrecisionOrder) -> Future[None]:
        """Return a future that ends when all workers have answered. It fails if none can carry the order out."""
        body = order.to_json()
        self._fleet.remember(_REMEMBERED, f"{order.model}/{order.version}", body)
        return _any_of(self._fleet.ask("switch", body), order.precision)

    def transition(self, model: str, version: int, to: Precision) -> None:
        for worker in self._fleet.running[:1]:
            self._fleet.ask_one(worker, "transition", {"model": model, "version": version, "to": to})


def _any_of(pending: Mapping[str, Future[Body]], precision: Precision) -> Future[None]:
    result: Future[None] = Future()
    remaining, lock = set(pending), threading.Lock()

    def finish(worker: str, done: Future[Body]) -> None:
        error = done.exception()
        # Only a worker that has not loaded the model yet can reject bf16, and it will begin with bf16 anyway.
        if error is not None and not died(error) and precision == "fp32":
            _log.error("%s cannot switch to fp32: %s", worker, brief(error))
        with lock:
            remaining.discard(worker)
            if remaining:
                return
        errors = [found for each in pending.values() if (found := each.exception()) is not None]
        if len(errors) < len(pending):
            result.set_result(None)
        else:
            result.set_exception(next((each for each in errors if not died(each)), errors[0]))

    if not pending:
        result.set_exception(Unavailable("no worker of this server is running"))
    for worker, each in pending.items():
        each.add_done_callback(lambda done, worker=worker: finish(worker, done))  # type: ignore[misc]
    return result
