"""The models of several workers: changed in all of them or in none, and answered with the same precision.

Changes of one model are made in the order in which they came, those of different models side by side. One worker tries
a change first. If it cannot be made, only that worker fails, and the others go on serving what they served. If another
cannot follow, all of them go back.
"""

from __future__ import annotations

import logging
import time
from asyncio import AbstractEventLoop, Lock, gather, run_coroutine_threadsafe, sleep, wait, wrap_future
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future

from bf16kit.messages.errors import Bf16kitError, RuntimeFailure, Unavailable
from bf16kit.messages.wording import brief
from bf16kit.service.drift.fallbackcontroller import ActivePlan, PrecisionOrder
from bf16kit.service.models import loads
from bf16kit.service.models.plan import DesiredModel
from bf16kit.service.models.rollouts import NotLoaded
from bf16kit.service.peers.channel import Body, to_json
from bf16kit.service.peers.peer import died
from bf16kit.service.request import Precision
from bf16kit.service.workers.fleet import Fleet
from bf16kit.service.workers.state import Key

_log = logging.getLogger(__name__)
_PRECISION = "precision"  # the kind of an order; a worker gets it at its start, too
_POLL_SECONDS = 0.25


class WorkerModels:
    """A :class:`bf16kit.service.leader.ServedModels` of several workers. Changes run on ``loop``, another thread's.

    ``changed`` is called with a model's name and those of its versions that all workers have reloaded or unloaded.
    """

    def __init__(
        self,
        fleet: Fleet,
        loop: AbstractEventLoop,
        changed: Callable[[str, Collection[int]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._loop = loop
        self._on_changed = changed
        self._clock = clock
        self._asked: dict[str, DesiredModel] = {}  # the newest change of each model, also if it has failed
        self._since: dict[Key, float] = {}  # when all workers had reloaded a version
        self._turns: defaultdict[str, Lock] = defaultdict(Lock)  # by model: held while it is changed
        self._closed = False

    def apply(self, desired: DesiredModel) -> Future[None]:
        """Return a future that ends when every worker serves ``desired``.

        A worker that dies meanwhile gets it at its restart. The future fails with Unavailable once this is closed, or
        if something else is wanted before the change begins or while it takes long.
        """
        self._asked[desired.name] = desired
        return run_coroutine_threadsafe(self._apply(desired), self._loop)

    def apply_all(self, desired_models: Iterable[DesiredModel]) -> dict[str, Future[None]]:
        """Set the models that all workers start with, before any runs. Return a future per model, by name.

        It ends when no worker loads the model any more, or one could not.
        """
        self._asked = {desired.name: desired for desired in desired_models}
        self._fleet.change(self._asked)
        return {name: run_coroutine_threadsafe(self._loaded(each), self._loop) for name, each in self._asked.items()}

    def close(self) -> None:
        """Start no further change: those that wait fail with Unavailable. A change in progress continues."""
        self._closed = True

    # --- which precision answers --------------------------------------------------------------------------------------

    def active_plan(self, model: str, version: int) -> ActivePlan | None:
        """See :meth:`bf16kit.service.drift.fallbackcontroller.ServingProcesses.active_plan`."""
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
        return run_coroutine_threadsafe(_carried_out(order, pending), self._loop)

    def transition(self, model: str, version: int, to: Precision) -> None:
        """Count a change of precision, in one worker for all."""
        for worker in self._fleet.running[:1]:
            self._fleet.ask_one(worker, "transition", {"model": model, "version": version, "to": to})

    # --- on the loop --------------------------------------------------------------------------------------------------

    async def _loaded(self, desired: DesiredModel) -> None:
        """Wait until workers that begin with ``desired`` have loaded it. Raises Unavailable if one could not."""
        while True:
            self._check_wanted(desired)
            slots = [self._fleet.state.slots.get((desired.name, version)) for version in desired.versions]
            if all(slot is not None and slot.state != "loading" for slot in slots):
                for slot in slots:
                    if slot is not None and slot.state != "ready":
                        raise Unavailable(
                            f"model {slot.name!r}: version {slot.version} cannot be loaded: {slot.reason}"
                        )
                return
            await sleep(_POLL_SECONDS)

    def _check_wanted(self, desired: DesiredModel) -> None:
        if self._asked[desired.name] != desired:
            raise Unavailable(f"model {desired.name!r} is being changed again instead")

    async def _apply(self, desired: DesiredModel) -> None:
        async with self._turns[desired.name]:
            if self._closed:
                raise Unavailable("the server is stopping; try another", "draining")
            self._check_wanted(desired)
            before = self._fleet.desired_models.get(desired.name, DesiredModel(desired.name))
            try:
                await self._apply_everywhere(before, desired)
            except Bf16kitError as error:
                if not _stopping(error):
                    named = f"model {desired.name!r}: "
                    _log.error("%s%s", named, str(error).replace(named, "", 1))
                raise
            versions = _changed(before, desired)
            now = self._clock()
            self._since |= {(desired.name, version): now for version in versions}
            for version in versions:  # orders were for what was served before
                self._fleet.forget(_PRECISION, f"{desired.name}/{version}")
            if versions:
                self._on_changed(desired.name, versions)

    async def _apply_everywhere(self, before: DesiredModel, desired: DesiredModel) -> None:
        first = await self._try(before, desired) if desired.plans else ""
        self._fleet.change_model(desired)  # workers that start from now on begin with it
        failed = await self._all([name for name in self._fleet.running if name != first], desired)
        if failed is not None:
            if first is not None and desired.plans:
                self._fleet.change_model(before)
                await self._go_back(self._fleet.running, before)
            raise failed
        if first is None:
            await self._loaded(desired)

    async def _try(self, before: DesiredModel, desired: DesiredModel) -> str | None:
        """Have one worker load ``desired``, and return the worker's name.

        If that fails, restore what it served and raise its error. Returns None if no worker can try: none runs, or it
        died while nothing was served, perhaps of what it began with. Then what workers begin with must change.
        """
        first = next(iter(self._fleet.running), None)
        if first is None:
            return None
        serving = any(slot.state == "ready" for slot in self._fleet.state.models())
        self._fleet.change_model(before, trying=desired)
        answer = wrap_future(self._fleet.ask_to_serve(first, desired))
        answer.add_done_callback(lambda done: done.exception())  # it is known, also if nobody waits any more
        try:
            begun = time.monotonic()
            while not (await wait([answer], timeout=_POLL_SECONDS))[0]:
                if time.monotonic() - begun >= loads.PATIENCE_SECONDS:
                    self._check_wanted(desired)
            await answer
        except Exception as error:  # noqa: BLE001 -- whatever it is, the worker is not left as it is
            if died(error) and not serving:
                return None
            failed = error if isinstance(error, Bf16kitError) else RuntimeFailure(f"{first}: {brief(error)}")
            slots = self._fleet.slots_of(first, desired.name)
            new = [slots.get(plan.version) for plan in desired.plans if plan not in before.plans]
            if not answer.done() or any(slot is not None and slot.state == "ready" and not slot.reason for slot in new):
                await self._go_back([first], before)
                failed = NotLoaded(str(failed), error, slots)
            raise failed from None
        finally:
            self._fleet.change_model(before)
        return first

    async def _go_back(self, names: Collection[str], before: DesiredModel) -> None:
        if (failed := await self._all(names, before)) is not None and not _stopping(failed):
            _log.error("model %r: a worker does not serve what it did: %s", before.name, failed)

    async def _all(self, names: Collection[str], desired: DesiredModel) -> NotLoaded | None:
        """Have these workers serve ``desired``.

        Return the first error of one that still runs: a dead one gets it anyway.
        """
        asked = [wrap_future(self._fleet.ask_to_serve(name, desired)) for name in names]
        answers = await gather(*asked, return_exceptions=True)
        for name, error in zip(names, answers, strict=True):
            if isinstance(error, BaseException) and not died(error):
                return NotLoaded(f"{name}: {brief(error)}", error, self._fleet.slots_of(name, desired.name))
        return None


async def _carried_out(order: PrecisionOrder, pending: Mapping[str, Future[Body]]) -> None:
    """Wait until all workers have answered an order. Raises an error if none has carried it out."""
    if not pending:
        raise Unavailable("no worker of this server is running")
    answers = await gather(*map(wrap_future, pending.values()), return_exceptions=True)
    errors = {worker: each for worker, each in zip(pending, answers, strict=True) if isinstance(each, BaseException)}
    for worker, error in errors.items():
        # Only a worker that has not loaded the model yet can reject bf16, and it will begin with bf16 anyway.
        if not died(error) and order.precision == "fp32":
            _log.error("%s cannot switch to fp32: %s", worker, brief(error))
    if len(errors) == len(pending):
        raise next((each for each in errors.values() if not died(each)), next(iter(errors.values())))


def _stopping(error: Bf16kitError) -> bool:
    return isinstance(error, Unavailable) and error.reason == "draining"


def _changed(before: DesiredModel, after: DesiredModel) -> list[int]:
    """Return the versions that are now served differently, or not at all. The series of those that failed stay."""
    plans = [plan for plan in (*before.plans, *after.plans) if plan not in before.plans or plan not in after.plans]
    gone = before.failed_versions - after.reported_versions
    return sorted({plan.version for plan in plans} - after.failed_versions | gone)
