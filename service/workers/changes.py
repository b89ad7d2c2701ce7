"""Operators' changes while several workers serve: applied to all workers or to none.

Models are changed side by side, a few at a time, so that a load that takes long holds up no other model. One worker
tries a change first. If it cannot be made, only that worker fails, and the others go on serving what they served. If
another cannot follow, all of them go back.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, wait
from typing import Any

from bf16kit.messages.errors import Bf16kitError, Unavailable
from service.models.plan import DesiredModel
from service.models.reconciler import CHANGES_AT_ONCE
from service.peers.peer import ENDED
from service.workers.fleet import Fleet
from service.workers.sequences import Sequences

_log = logging.getLogger(__name__)
Changed = Callable[[str, Collection[int]], None]
_STOPPING = "draining"  # the reason of an Unavailable
_AT_ONCE_SECONDS = 20.0  # for quick requests: a worker that does not answer is killed earlier


class ModelChanges:
    """Applies desired models to all workers. :meth:`apply` and :meth:`apply_all` are called by the controller.

    ``changed`` is called with a model's name and those of its versions that all workers have reloaded or unloaded.
    """

    def __init__(self, fleet: Fleet, changed: Changed = lambda model, versions: None) -> None:
        self._fleet = fleet
        self._on_changed = changed
        self._newest: dict[str, DesiredModel] = {}  # the newest change of each model
        self._failed: dict[str, DesiredModel] = {}  # what a worker failed to apply; its slots hold the reason
        self._starting: dict[str, tuple[DesiredModel, Future[None]]] = {}  # by model: what the workers begin with
        self._sequences = Sequences(CHANGES_AT_ONCE, "changes")
        self._closed = False
        fleet.subscribe(self._end_starts)

    def apply(self, desired: DesiredModel) -> Future[None]:
        """Return a future that ends when every worker serves ``desired``.

        A worker that dies meanwhile gets it at its restart. The future fails with Unavailable once this is closed.
        """
        self._newest[desired.name] = desired
        self._starting.pop(desired.name, None)
        try:
            return self._sequences.submit(desired.name, lambda: self._apply_everywhere(desired))
        except RuntimeError:
            refused: Future[None] = Future()
            refused.set_exception(_stopping())
            return refused

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
        self._sequences.close()

    def _end_starts(self) -> None:
        """End the futures of the models that the workers began with, and that are loaded by now."""
        view = self._fleet.view
        for name, (desired, future) in list(self._starting.items()):
            slots = [view.slots.get((name, version)) for version in desired.versions]
            if any(slot is None or slot.state == "loading" for slot in slots) or not self._starting.pop(name, None):
                continue
            failed = [slot for slot in slots if slot is not None and slot.state != "ready"]
            if failed:
                future.set_exception(Unavailable(f"model {name!r} version {failed[0].version}: {failed[0].reason}"))
            else:
                future.set_result(None)

    # --- the threads --------------------------------------------------------------------------------------------------

    def _apply_everywhere(self, desired: DesiredModel) -> None:
        if self._closed:
            raise _stopping()
        served = self._fleet.desired_models.get(desired.name)
        before = DesiredModel(desired.name) if served is None else served
        if desired.plans:
            self._fleet.change_model(before, trying=desired)
            try:
                first = self._try(desired, served)
            finally:
                self._fleet.change_model(before)
        else:
            first = ""
        self._failed.pop(desired.name, None)
        self._fleet.change_model(desired)  # workers that start from now on begin with it
        others = [name for name in self._fleet.running if name != first]
        failed = self._all(others, desired)
        if failed is not None and desired.plans:
            self._fleet.change_model(before)
            self._all(self._fleet.running, before)
            raise failed
        if versions := _changed(before, desired):
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


class FleetSettings:
    """The ``logs`` and ``traces`` settings of all workers, including those started later."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._lock = threading.Lock()  # every worker gets the changes in the same order
        # The requested changes, not the resulting settings: a setting that a model lacks must remain the server's.
        self._changed: dict[str, dict[str, Any]] = {}

    def update(self, what: str, changes: Mapping[str, Any], model: str) -> Mapping[str, Any]:
        """Change settings, and return the resulting ones.

        Raises the worker's error for an invalid change, which all workers report alike.
        """
        with self._lock:
            pending = self._fleet.ask("settings", {"what": what, "changes": changes, "model": model})
            done, late = wait(pending.values(), _AT_ONCE_SECONDS)
            errors = [error for future in done if (error := future.exception()) is not None and not died(error)]
            if errors:
                raise errors[0]
            answers = [future.result() for future in done if future.exception() is None]
            if late or not answers:
                raise Unavailable("a worker of this server did not answer; try again")
            now: Mapping[str, Any] = answers[0]["settings"]
            name = f"{what} {model}"
            changed = self._changed.setdefault(name, {})
            changed |= changes
            body = {"what": what, "changes": dict(changed), "model": model}
            self._fleet.remember("settings", name, body)
            for worker, future in pending.items():
                if future.exception() is not None:  # a replacement may have started before this was remembered
                    self._fleet.ask_one(worker, "settings", body)
            return now


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


def died(error: BaseException) -> bool:
    """Whether ``error`` says that a worker ended before it answered, or had not started."""
    return isinstance(error, Unavailable) and error.reason == ENDED


def _note(done: Future[None]) -> None:
    error = done.exception()
    if error is not None and getattr(error, "reason", "") != _STOPPING:
        _log.error("%s", error)
