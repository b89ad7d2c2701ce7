"""The models of several workers: changed in all of them or in none, and answered with the same precision.

Models are changed side by side, a few at a time, so that a load that takes long holds up no other model. One worker
tries a change first. If it cannot be made, only that worker fails, and the others go on serving what they served. If
another cannot follow, all of them go back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from bf16kit.messages.errors import Bf16kitError, Unavailable
from bf16kit.messages.wording import brief
from service.drift.fallbackcontroller import ActivePlan, PrecisionOrder
from service.models.plan import DesiredModel
from service.models.reconciler import CHANGES_AT_ONCE
from service.peers.channel import Body, to_json
from service.peers.peer import died
from service.request import Precision
from service.workers.fleet import Fleet
from service.workers.state import Key

_log = logging.getLogger(__name__)
Changed = Callable[[str, Collection[int]], None]
_STOPPING = "draining"  # the reason of an Unavailable
_PRECISION = "precision"  # the kind of an order; a worker gets it at its start, too


class WorkerModels:
    """A :class:`service.leader.ServedModels` of several workers.

    ``changed`` is called with a model's name and those of its versions that all workers have reloaded or unloaded.
    """

    def __init__(
        self,
        fleet: Fleet,
        changed: Changed = lambda model, versions: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._fleet = fleet
        self._on_changed = changed
        self._clock = clock
        self._newest: dict[str, DesiredModel] = {}  # the newest change of each model
        self._failed: dict[str, DesiredModel] = {}  # what a worker failed to apply; its slots hold the reason
        self._starting: dict[str, tuple[DesiredModel, Future[None]]] = {}  # by model: what the workers begin with
        self._since: dict[Key, float] = {}  # when all workers had reloaded a version
        self._pool = ThreadPoolExecutor(CHANGES_AT_ONCE, "changes")
        self._last: dict[str, Future[None]] = {}  # the last change of each model: the next one begins when it ends
        self._lock = threading.Lock()  # of the two above
        self._closed = False
        fleet.state.subscribe(self._end_starts)

    def apply(self, desired: DesiredModel) -> Future[None]:
        """Return a future that ends when every worker serves ``desired``.

        A worker that dies meanwhile gets it at its restart. The future fails with Unavailable once this is closed.
        """
        self._newest[desired.name] = desired
        self._starting.pop(desired.name, None)
        future: Future[None] = Future()

        def run() -> None:
            try:
                self._apply_everywhere(desired)
            except BaseException as error:  # noqa: BLE001 -- it belongs to the one who waits
                future.set_exception(error)
            else:
                future.set_result(None)

        def begin(_: object) -> None:
            try:
                self._pool.submit(run)
            except RuntimeError:  # it is closed
                future.set_exception(_stopping())

        with self._lock:
            before, self._last[desired.name] = self._last.get(desired.name), future
        if before is None:
            begin(None)
        else:
            before.add_done_callback(begin)
        return future

    def apply_all(self, desired_models: Iterable[DesiredModel]) -> dict[str, Future[None]]:
        """Serve these models and no others. Return a future per model that changes, by name, as :meth:`apply` does.

        Before any worker runs, this sets the models that all of them start with. A future ends when no worker loads
        the model any more, or one could not.
        """
        wanted, before = {desired.name: desired for desired in desired_models}, self._fleet.desired_models
        futures: dict[str, Future[None]] = {}
        if not self._fleet.running:
            futures = {name: Future() for name in wanted}
            self._starting = {name: (desired, futures[name]) for name, desired in wanted.items()}
            self._fleet.change(wanted)
            return futures
        for name in sorted({*before, *wanted}):
            desired = wanted.get(name, DesiredModel(name))
            tried = self._newest.get(name) == desired  # or is being tried
            if not tried and (desired != before.get(name, DesiredModel(name)) or name in self._failed):
                futures[name] = self.apply(desired)
                futures[name].add_done_callback(_note)
        return futures

    def close(self) -> None:
        """Start no further change: those that wait fail with Unavailable. A change in progress continues."""
        self._closed = True
        self._pool.shutdown(wait=False)

    def _end_starts(self) -> None:
        """End the futures of the models that the workers began with, and that are loaded by now."""
        states = self._fleet.state.slots
        for name, (desired, future) in list(self._starting.items()):
            slots = [states.get((name, version)) for version in desired.versions]
            if any(slot is None or slot.state == "loading" for slot in slots) or not self._starting.pop(name, None):
                continue
            failed = [slot for slot in slots if slot is not None and slot.state != "ready"]
            if failed:
                future.set_exception(Unavailable(f"model {name!r} version {failed[0].version}: {failed[0].reason}"))
            else:
                future.set_result(None)

    # --- which precision answers --------------------------------------------------------------------------------------

    def active_plan(self, model: str, version: int) -> ActivePlan | None:
        """See :meth:`service.drift.fallbackcontroller.ServingProcesses.active_plan`."""
        desired = self._fleet.desired_models.get(model)
        plan = None if desired is None else next((plan for plan in desired.plans if plan.version == version), None)
        if plan is None:
            return None
        return ActivePlan(plan.digest, self._since.get((model, version), 0.0), plan.serving.fallback)

    def order(self, order: PrecisionOrder) -> Future[None]:
        """Return a future that ends when all workers have answered. It fails if none can carry the order out."""
        body = to_json(order)
        self._fleet.remember(_PRECISION, f"{order.model}/{order.version}", body)
        pending = self._fleet.ask(_PRECISION, body)
        result: Future[None] = Future()
        remaining, lock = set(pending), threading.Lock()

        def finish(worker: str, done: Future[Body]) -> None:
            error = done.exception()
            # Only a worker that has not loaded the model yet can reject bf16, and it will begin with bf16 anyway.
            if error is not None and not died(error) and order.precision == "fp32":
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

    def transition(self, model: str, version: int, to: Precision) -> None:
        """Count a change of precision, in one worker for all."""
        for worker in self._fleet.running[:1]:
            self._fleet.ask_one(worker, "transition", {"model": model, "version": version, "to": to})

    # --- the threads --------------------------------------------------------------------------------------------------

    def _apply_everywhere(self, desired: DesiredModel) -> None:
        if self._closed:
            raise _stopping()
        served = self._fleet.desired_models.get(desired.name)
        before = DesiredModel(desired.name) if served is None else served
        first = ""
        if desired.plans:
            self._fleet.change_model(before, trying=desired)
            try:
                first = self._try(desired, served)
            finally:
                self._fleet.change_model(before)
        self._failed.pop(desired.name, None)
        self._fleet.change_model(desired)  # workers that start from now on begin with it
        failed = self._all([name for name in self._fleet.running if name != first], desired)
        if failed is not None and desired.plans:
            self._fleet.change_model(before)
            self._all(self._fleet.running, before)
            raise failed
        versions = _changed(before, desired)
        now = self._clock()
        self._since |= {(desired.name, version): now for version in versions}
        for version in versions:  # orders were for what was served before
            self._fleet.forget(_PRECISION, f"{desired.name}/{version}")
        if versions:
            self._on_changed(desired.name, versions)

    def _try(self, desired: DesiredModel, before: DesiredModel | None) -> str:
        """Have one worker load ``desired``, and return the worker's name.

        If that fails, restore what it served and raise its error.
        """
        first = next(iter(self._fleet.running), None)
        if first is None:
            raise Unavailable("no worker of this server is running; try again")
        try:
            self._fleet.ask_to_serve(first, desired).result()
        except Bf16kitError:
            self._failed[desired.name] = desired
            if before is not None and not _serves_as_before(desired, before):
                self._all([first], before)
            raise
        return first

    def _all(self, names: Iterable[str], desired: DesiredModel) -> Bf16kitError | None:
        """Have these workers serve ``desired``.

        Return the first error of one that still runs: a dead one gets it anyway.
        """
        pending = {name: self._fleet.ask_to_serve(name, desired) for name in names}
        wait(pending.values())
        for name, future in pending.items():
            error = future.exception()
            if isinstance(error, Bf16kitError) and not died(error):
                _log.error("%s: model %r: %s", name, desired.name, error)
                return error
        return None


def _stopping() -> Unavailable:
    return Unavailable("the server is stopping; try another", _STOPPING)


def _serves_as_before(desired: DesiredModel, before: DesiredModel) -> bool:
    """Whether a worker that failed to apply ``desired`` serves what it did: nothing new, and everything it had."""
    new = [plan for plan in desired.plans if plan not in before.plans]
    kept = all(plan in desired.plans for plan in before.plans)
    return len(new) == 1 and (len(desired.plans) == 1 or kept or new[0].serving.version_policy.tries_older)


def _changed(before: DesiredModel, after: DesiredModel) -> list[int]:
    """Return the versions that are now served differently, or not at all. The series of those that failed stay."""
    plans = [plan for plan in (*before.plans, *after.plans) if plan not in before.plans or plan not in after.plans]
    gone = before.failed_versions - after.reported_versions
    return sorted({plan.version for plan in plans} - after.failed_versions | gone)


def _note(done: Future[None]) -> None:
    error = done.exception()
    if error is not None and getattr(error, "reason", "") != _STOPPING:
        _log.error("%s", error)
