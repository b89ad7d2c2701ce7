"""Operators' changes while several workers serve: applied to all workers or to none.

Models are changed one after another, as in a single process. One worker tries a change first. If it cannot be made,
only that worker fails, and the others go on serving what they served. If another cannot follow, all of them go back.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from bf16kit.errors import Bf16kitError, Unavailable
from service.models.plan import Wish
from service.peers.peer import ENDED
from service.workers.fleet import Fleet

_log = logging.getLogger(__name__)
Changed = Callable[[str, Collection[int]], None]
_AT_ONCE_SECONDS = 20.0  # for quick requests: a worker that does not answer is killed earlier


class ModelChanges:
    """Applies wishes to all workers. :meth:`want` and :meth:`desire` are called by the reconciler.

    ``changed`` is called with a model's name and those of its versions that all workers have reloaded or unloaded.
    """

    def __init__(self, fleet: Fleet, changed: Changed = lambda model, versions: None) -> None:
        self._fleet = fleet
        self._on_changed = changed
        self._failed: dict[str, Wish] = {}  # wishes that a worker failed to fulfil; its slots hold the reason
        self._thread = ThreadPoolExecutor(1, "changes")

    def want(self, wish: Wish) -> Future[None]:
        """Return a future that ends when every worker serves ``wish``.

        A worker that dies meanwhile gets the wish at its restart.
        """
        return self._thread.submit(self._fulfil, wish)

    def desire(self, wishes: Iterable[Wish]) -> None:
        """Serve these models and no others.

        Before any worker runs, this sets the models that all of them start with.
        """
        wanted, before = {wish.name: wish for wish in wishes}, self._fleet.wishes
        if not self._fleet.running:
            self._fleet.change(wanted)
            return
        for name in sorted({*before, *wanted}):
            wish = wanted.get(name, Wish(name))
            if wish != before.get(name, Wish(name)) or self._failed.get(name, wish) != wish:
                self.want(wish).add_done_callback(_note)

    def close(self) -> None:
        """Start no further change. A change in progress continues."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _fulfil(self, wish: Wish) -> None:
        before = self._fleet.wishes
        after = {**before, wish.name: wish} if wish.plans else {n: w for n, w in before.items() if n != wish.name}
        if wish.plans:
            self._fleet.change(before, trying=wish)
            try:
                first = self._try(wish, before.get(wish.name))
            finally:
                self._fleet.change(before)
        else:
            first = ""
        self._failed.pop(wish.name, None)
        self._fleet.change(after)  # workers that start from now on begin with it
        others = [name for name in self._fleet.running if name != first]
        failed = self._all(others, wish)
        if failed is not None and wish.plans:
            self._fleet.change(before)
            self._all(self._fleet.running, before.get(wish.name, Wish(wish.name)))
            raise failed
        if versions := _changed(before.get(wish.name, Wish(wish.name)), wish):
            self._on_changed(wish.name, versions)

    def _try(self, wish: Wish, before: Wish | None) -> str:
        """Have one worker load ``wish``, and return the worker's name.

        If that fails, restore what it served and raise its error.
        """
        first = next(iter(self._fleet.running), None)
        if first is None:
            raise Unavailable("no worker of this server is running; try again")
        try:
            self._fleet.ask_one(first, "want", {"wish": wish.to_json()}).result()
        except Bf16kitError:
            self._failed[wish.name] = wish
            if before is not None and not _serves_as_before(wish, before):
                self._all([first], before)
            raise
        return first

    def _all(self, names: Iterable[str], wish: Wish) -> Bf16kitError | None:
        """Have these workers serve ``wish``.

        Return the first error of one that still runs: a dead one gets the wish anyway.
        """
        pending = {name: self._fleet.ask_one(name, "want", {"wish": wish.to_json()}) for name in names}
        wait(pending.values())
        for name, future in pending.items():
            error = future.exception()
            if isinstance(error, Bf16kitError) and not died(error):
                _log.error("%s: model %r: %s", name, wish.name, error)
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


def _serves_as_before(wish: Wish, before: Wish) -> bool:
    """Whether a worker that could not fulfil ``wish`` still serves what it did: nothing new, and everything it had."""
    new = [plan for plan in wish.plans if plan not in before.plans]
    return len(new) == 1 and (len(wish.plans) == 1 or all(plan in wish.plans for plan in before.plans))


def _changed(before: Wish, after: Wish) -> list[int]:
    """Return the versions that are now served differently, or not at all."""
    return sorted(
        {plan.version for plan in (*before.plans, *after.plans) if plan not in before.plans or plan not in after.plans}
    )


def died(error: BaseException) -> bool:
    """Whether ``error`` says that a worker ended before it answered, or had not started."""
    return isinstance(error, Unavailable) and error.reason == ENDED


def _note(done: Future[None]) -> None:
    error = None if done.cancelled() else done.exception()
    if error is not None:
        _log.error("%s", error)
