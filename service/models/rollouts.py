"""Applies desired models, and has older versions serve in place of versions that cannot be loaded.

Whoever decides which versions serve does this for all processes: with several workers all must serve the same.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TypeAlias

from bf16kit.messages.errors import Bf16kitError, Unavailable
from service.contract import SlotView
from service.models.loads import GIVEN_UP
from service.models.plan import DesiredModel, FailedVersion, Plan
from service.models.serving import Serving

_log = logging.getLogger(__name__)
FIRST_RETRY_SECONDS = 30.0  # from the poll that finds a model not loaded to the first retry
LONGEST_RETRY_SECONDS = 3600.0  # longest pause between two retries
ApplyAll: TypeAlias = Callable[[Iterable[DesiredModel]], Mapping[str, Future[None]]]


@dataclass(slots=True)
class _Rollout:
    """What is wanted of a model, and what is applied for it. A newer wish is another object."""

    wanted: DesiredModel
    applied: DesiredModel
    loads_older: bool


class Rollouts:
    """Passes desired models to ``apply`` and ``apply_all``, and follows their futures.

    ``slots`` returns the slots of the server. ``older`` returns the plans on disk of a model's versions that are older
    than all of a desired model's, the newest first. ``lock`` is the controller's, which it holds when it calls.
    """

    def __init__(
        self,
        apply: Callable[[DesiredModel], Future[None]],
        apply_all: ApplyAll,
        slots: Callable[[], Iterable[SlotView]],
        older: Callable[[DesiredModel], Iterable[Plan]],
        lock: threading.RLock,
    ) -> None:
        self._apply = apply
        self._apply_all = apply_all
        self._slots = slots
        self._older = older
        self._lock = lock
        self._rollouts: dict[str, _Rollout] = {}
        self._plans: dict[str, dict[int, Plan]] = {}  # of every version that was ever applied, without settings

    def versions(self, name: str) -> frozenset[int]:
        """The versions of a model that were ever to be served."""
        return frozenset(self._plans.get(name, ()))

    def apply(self, wanted: DesiredModel, *, loads_older: bool = True) -> Future[None]:
        """Apply ``wanted``. If it fails, versions that serve may go on; with ``loads_older`` others are loaded, too."""
        self._rollouts[wanted.name] = rollout = _Rollout(wanted, wanted, loads_older)
        return self._follow(rollout)

    def apply_all(self, desired_models: Iterable[DesiredModel]) -> None:
        """Apply exactly these models. Of one that was wanted before, what was applied in its place is kept."""
        before = self._rollouts
        self._rollouts = {}
        for wanted in desired_models:
            known = before.get(wanted.name)
            rollout = known if known is not None and known.wanted == wanted else _Rollout(wanted, wanted, True)
            self._rollouts[wanted.name] = rollout
            self._remember(rollout.applied)
        futures = self._apply_all([rollout.applied for rollout in self._rollouts.values()])
        for name, future in futures.items():
            if (applied := self._rollouts.get(name)) is not None:
                self._watch(applied, future)

    def _follow(self, rollout: _Rollout) -> Future[None]:
        self._remember(rollout.applied)
        future = self._apply(rollout.applied)
        self._watch(rollout, future)
        return future

    def _remember(self, applied: DesiredModel) -> None:
        plans = self._plans.setdefault(applied.name, {})
        plans.update({plan.version: replace(plan, serving=Serving()) for plan in applied.plans})

    def _watch(self, rollout: _Rollout, future: Future[None]) -> None:
        applied = rollout.applied
        future.add_done_callback(lambda done: self._on_done(rollout, applied, done))

    def _on_done(self, rollout: _Rollout, applied: DesiredModel, done: Future[None]) -> None:
        """Decide what to do next on a thread of its own: this one loads models, or receives what workers report."""
        error = None if done.cancelled() else done.exception()
        if error is None and applied.failed:
            failed = (f"version {each.plan.version} cannot be loaded: {each.reason}" for each in applied.failed)
            _log.error("model %r: %s; %s", applied.name, "; ".join(failed), applied.instead)
        stopping = isinstance(error, Unavailable) and error.reason == "draining"
        if applied.plans and isinstance(error, Bf16kitError) and not stopping:
            threading.Thread(target=self._replace, args=(rollout, applied), name="older-version", daemon=True).start()

    def _replace(self, rollout: _Rollout, applied: DesiredModel) -> None:
        """Apply what may serve instead of ``applied``, unless something else is wanted by now."""
        name = applied.name
        with self._lock:
            if self._rollouts.get(name) is not rollout or rollout.applied is not applied:
                return
            slots = {slot.version: slot for slot in self._slots() if slot.name == name}
            try:
                older = list(self._older(applied)) if rollout.loads_older else []
            except Bf16kitError as error:
                _log.error("model %r: its older versions cannot be listed: %s", name, error)
                older = []
            found = instead_of(applied, slots, self._plans.get(name, {}), older)
            if found is None:
                return
            for plan in found.plans:
                if not _serves(slots.get(plan.version)):
                    _log.warning("model %r: a newer version cannot be loaded; trying version %d", name, plan.version)
            rollout.applied = found
            self._follow(rollout)


def instead_of(
    tried: DesiredModel, slots: Mapping[int, SlotView], known: Mapping[int, Plan], older: Iterable[Plan]
) -> DesiredModel | None:
    """Return what to serve now that ``tried`` could not be loaded as a whole; None if nothing else may serve.

    These are other versions that serve already, with the newest settings: ``known`` has their paths and stamps. If they
    are too few, and the version policy allows it, the first of ``older`` that were not tried are added. ``slots`` are
    the model's, by version.
    """
    failing = [plan for plan in tried.plans if not _serves(slots.get(plan.version))]
    if not failing or any(plan.broken for plan in failing):
        return None
    serving = failing[0].serving
    tries_older = serving.version_policy.tries_older
    running = [
        replace(known[version], serving=serving)
        for version in sorted(slots.keys() & known.keys() - tried.reported_versions, reverse=True)
        if _serves(slots[version])
    ]
    others = {plan.version for plan in running} | tried.reported_versions
    new = [plan for plan in older if plan.version not in others] if tries_older else []
    chosen = [*running, *new][: len(failing)]
    kept = [plan for plan in tried.plans if plan not in failing]
    if not chosen and not (kept and tries_older):
        return None
    plans = tuple(sorted((*kept, *chosen), key=lambda plan: plan.version))
    failed = tuple(FailedVersion(plan, _reason(slots.get(plan.version))) for plan in failing)
    return DesiredModel(tried.name, plans, tried.failed + failed)


class Retries:
    """Decides when to try again to load a model whose files have not changed. For one thread, at every poll.

    A full disk, a lack of memory, a busy device: such causes pass, and nothing in the repository shows it. So every
    failed load is tried again, with growing pauses, except what ``serving.yaml`` rules out, and loads that were given
    up, whose threads cannot be ended. ``clock`` returns seconds.
    """

    def __init__(self, slots: Callable[[], Iterable[SlotView]], clock: Callable[[], float] = time.monotonic) -> None:
        self._slots = slots
        self._clock = clock
        #: By name: the model, when it is due, and the pause after that.
        self._waiting: dict[str, tuple[DesiredModel, float, float]] = {}

    def due(self, desired_models: Mapping[str, DesiredModel]) -> list[DesiredModel]:
        """Return the ``desired_models`` to try again now. One that has changed starts again with the first pause."""
        now = self._clock()
        served = {(slot.name, slot.version): slot for slot in self._slots()}
        before, self._waiting = self._waiting, {}
        found = []
        for name, desired in desired_models.items():
            slots = [served.get((name, plan.version)) for plan in desired.plans]
            if all(_serves(slot) and not slot.reason for slot in slots if slot is not None) and None not in slots:
                continue  # as desired: a reason beside a ready model says that its replacement failed
            if any(plan.broken for plan in desired.plans) or any(slot and GIVEN_UP in slot.reason for slot in slots):
                continue
            known, due, pause = before.get(name, (None, 0.0, 0.0))
            if known != desired:
                due, pause = now + FIRST_RETRY_SECONDS, FIRST_RETRY_SECONDS
            elif now >= due and not any(slot is not None and slot.state == "loading" for slot in slots):
                pause = min(2 * pause, LONGEST_RETRY_SECONDS)
                due = now + pause
                found.append(desired)
            self._waiting[name] = desired, due, pause
        return found


def _serves(slot: SlotView | None) -> bool:
    return slot is not None and slot.state == "ready"


def _reason(slot: SlotView | None) -> str:
    return (slot.reason if slot is not None else "") or "a worker could not load it; the server's log says why"
