"""Applies desired models, and has older versions serve in place of versions that cannot be loaded.

Whoever decides which versions serve does this for all processes: with several workers all must serve the same.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TypeAlias

from bf16kit.messages.errors import Bf16kitError, Unavailable
from bf16kit.service.contract import SlotView
from bf16kit.service.models.loads import GIVEN_UP
from bf16kit.service.models.plan import DesiredModel, FailedVersion, Plan
from bf16kit.service.models.serving import Serving

_log = logging.getLogger(__name__)
ApplyAll: TypeAlias = Callable[[Iterable[DesiredModel]], Mapping[str, Future[None]]]


class NotLoaded(Unavailable):
    """A change that was undone, because one of several processes could not make it.

    ``slots`` are the model's in that process, by version, as they were before that.
    """

    def __init__(self, text: str, cause: BaseException, slots: Mapping[int, SlotView]) -> None:
        super().__init__(text, getattr(cause, "reason", ""))
        self.slots = slots


@dataclass(slots=True)
class _Rollout:
    """What is wanted of a model, and what is applied for it. A newer wish is another object."""

    wanted: DesiredModel
    applied: DesiredModel
    loads_older: bool


class Rollouts:
    """Passes desired models to ``apply``, those of the start to ``apply_all``, and follows their futures.

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
        return self._follow(_Rollout(wanted, wanted, loads_older), self._apply(wanted))

    def start(self, desired_models: Collection[DesiredModel]) -> None:
        """Apply the models with which the server starts."""
        futures = self._apply_all(desired_models)
        for wanted in desired_models:
            self._follow(_Rollout(wanted, wanted, loads_older=True), futures[wanted.name])

    def replace_all(self, desired_models: Iterable[DesiredModel]) -> None:
        """Apply exactly these models. One that is wanted as before keeps what was applied in its place."""
        wanted = {name: DesiredModel(name) for name in self._rollouts}
        wanted |= {desired.name: desired for desired in desired_models}
        for name, desired in sorted(wanted.items()):
            if name not in self._rollouts or self._rollouts[name].wanted != desired:
                self.apply(desired)

    def _follow(self, rollout: _Rollout, future: Future[None]) -> Future[None]:
        """Remember what is applied, and act when its future ends. Returns the future."""
        applied = rollout.applied
        self._rollouts[applied.name] = rollout
        plans = self._plans.setdefault(applied.name, {})
        plans.update({plan.version: replace(plan, serving=Serving()) for plan in applied.plans})
        future.add_done_callback(lambda done: self._on_done(rollout, applied, done))
        return future

    def _on_done(self, rollout: _Rollout, applied: DesiredModel, done: Future[None]) -> None:
        """Decide what to do next on a thread of its own: this one loads models, or receives what workers report."""
        error = None if done.cancelled() else done.exception()
        if error is None and applied.failed:
            failed = (f"version {each.plan.version} cannot be loaded: {each.reason}" for each in applied.failed)
            _log.error("model %r: %s; %s", applied.name, "; ".join(failed), applied.instead)
        stopping = isinstance(error, Unavailable) and error.reason == "draining"
        if applied.plans and isinstance(error, Bf16kitError) and not stopping:
            given = rollout, applied, error
            threading.Thread(target=self._replace, args=given, name="older-version", daemon=True).start()

    def _replace(self, rollout: _Rollout, applied: DesiredModel, cause: Bf16kitError) -> None:
        """Apply what may serve instead of ``applied``, unless something else is wanted by now."""
        name = applied.name
        with self._lock:
            if self._rollouts.get(name) is not rollout or rollout.applied is not applied:
                return
            slots = {slot.version: slot for slot in self._slots() if slot.name == name}
            if isinstance(cause, NotLoaded):
                slots |= {version: slot for version, slot in cause.slots.items() if version in applied.versions}
            try:
                older = list(self._older(applied)) if rollout.loads_older else []
            except Bf16kitError as error:
                _log.error("model %r: its older versions cannot be listed: %s", name, error)
                older = []
            found = instead_of(applied, slots, self._plans.get(name, {}), older, undone=isinstance(cause, NotLoaded))
            if found is None:
                return
            for plan in found.plans:
                if not _serves(slots.get(plan.version)):
                    _log.warning("model %r: a newer version cannot be loaded; trying version %d", name, plan.version)
            rollout.applied = found
            self._follow(rollout, self._apply(found))


def instead_of(
    tried: DesiredModel,
    slots: Mapping[int, SlotView],
    known: Mapping[int, Plan],
    older: Iterable[Plan],
    *,
    undone: bool = False,
) -> DesiredModel | None:
    """Return what to serve now that ``tried`` could not be loaded as a whole; None if nothing else may serve.

    These are other versions that serve already, with the newest settings: ``known`` has their paths and stamps. If they
    are too few, and the version policy allows it, the first of ``older`` that were not tried are added. ``slots`` are
    the model's, by version. ``undone``: the versions of ``tried`` that could be loaded serve only if that is said.
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
    if not chosen and not (kept and (tries_older or undone)):
        return None
    plans = tuple(sorted((*kept, *chosen), key=lambda plan: plan.version))
    failed = tuple(FailedVersion(plan, _reason(slots.get(plan.version))) for plan in failing)
    return DesiredModel(tried.name, plans, tried.failed + failed)


def has_failed(desired: DesiredModel, slots: Mapping[int, SlotView]) -> bool:
    """Return whether ``desired`` is not served, although it was tried, for a cause that may have passed.

    A full disk, a lack of memory, a busy device: such causes pass, and nothing in the repository shows it. What
    ``serving.yaml`` rules out does not, nor a load that was given up, whose thread cannot be ended. ``slots`` are the
    model's, by version; a reason beside a ready model says that its replacement failed.
    """
    found = [slots.get(plan.version) for plan in desired.plans]
    if any(plan.broken for plan in desired.plans):
        return False
    if any(slot is not None and (slot.state == "loading" or GIVEN_UP in slot.reason) for slot in found):
        return False
    return not all(slot is not None and _serves(slot) and not slot.reason for slot in found)


def _serves(slot: SlotView | None) -> bool:
    return slot is not None and slot.state == "ready"


def _reason(slot: SlotView | None) -> str:
    return (slot.reason if slot is not None else "") or "a worker could not load it; the server's log says why"
