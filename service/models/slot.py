"""The slot of one version of a model: its state (loading, ready or unavailable) and the generation that answers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from bf16kit.messages.errors import Unavailable
from bf16kit.messages.wording import brief
from bf16kit.service.contract import State, describe
from bf16kit.service.drift.fallbackcontroller import PrecisionOrder
from bf16kit.service.models.generation import Generation
from bf16kit.service.models.plan import DesiredModel, Plan
from bf16kit.service.request import Observation
from bf16kit.service.telemetry.metrics import Metrics
from bf16kit.service.telemetry.modelmetrics import ModelMetrics

_log = logging.getLogger(__name__)
LONGEST_REASON = 1000  # characters


@dataclass(frozen=True, slots=True)
class _Status:
    """State, reason and generation in one object, so that readers see them consistently without a lock."""

    state: State
    reason: str
    model: Generation | None = None
    plan: Plan | None = None  # the plan by which the generation was loaded


class Slot:
    """See :class:`bf16kit.service.contract.Slot`. One thread of the reconciler at a time changes it; all may read."""

    def __init__(self, name: str, version: int, series: ModelMetrics, *, awaited: bool = True) -> None:
        self.name, self.version = name, version
        self.label = f"model {name!r} version {version}"
        self.series = series  # the generation's metrics; before there is one, they count rejected requests
        self.awaited = awaited  # the server is not ready without it
        self._status = _Status("loading", "loading")
        self._order: PrecisionOrder | None = None  # the newest one; guarded by the lock, as is its use
        self._order_lock = threading.Lock()

    @property
    def state(self) -> State:
        return self._status.state

    @property
    def reason(self) -> str:
        return self._status.reason

    @property
    def model(self) -> Generation | None:
        return self._status.model

    @property
    def running(self) -> dict[str, Any] | None:
        """See :attr:`bf16kit.service.contract.SlotView.running`."""
        return None if (model := self.model) is None else describe(model)

    @property
    def loaded(self) -> tuple[Generation, Plan] | None:
        """The generation and the plan by which it was loaded; None without a generation."""
        status = self._status
        return None if status.model is None or status.plan is None else (status.model, status.plan)

    def observe(self, seen: Observation) -> None:
        """See :meth:`bf16kit.service.contract.Slot.observe`."""
        self.series.request(seen)

    def serves(self, plan: Plan) -> bool:
        """Return whether the generation that answers was loaded by this very plan."""
        return self._status.plan == plan

    def order(self, order: PrecisionOrder) -> Future[None]:
        """Have the order's precision answer.

        The future fails with Unavailable if another generation answers, or none. The order is remembered, and carried
        out when the generation that it is for is published.
        """
        with self._order_lock:
            self._order = order
            future = self._carry_out()
        if future is None:
            future = Future()
            future.set_exception(Unavailable(f"{self.label} is not loaded here"))
        return future

    def _carry_out(self) -> Future[None] | None:
        order, loaded = self._order, self.loaded
        if order is None or loaded is None or loaded[1].digest != order.plan:
            return None
        return loaded[0].switch_precision(order.precision, order.reason)

    # --- changes ------------------------------------------------------------------------------------------------------

    def clear_reason(self) -> None:
        """Clear the reason: the generation that answers is the one wanted, even if a replacement failed before."""
        self._status = replace(self._status, reason="")
        self.series.replacement_failed(False)

    def start_loading(self) -> None:
        """Note that a plan is about to be loaded. The generation that answers stays."""
        if self._status.model is None:
            self._status = _Status("loading", "loading")

    def publish(self, model: Generation, plan: Plan) -> None:
        """Let ``model`` answer from now on, in the precision that was ordered for its plan.

        An order for another plan is dropped: that plan, loaded again, is a new generation, of which nothing is known.
        """
        self._status = _Status("ready", "", model, plan)
        with self._order_lock:
            if self._carry_out() is None:
                self._order = None

    def fail(self, reason: str, public: str = "") -> str:
        """Note that a load failed. The previous generation goes on answering; without one, the slot is unavailable.

        ``reason`` is for the log. ``public``, or else ``reason``, is for the status page, the repository's index and
        the caller: it is returned. Both are cut to a readable length, whatever names an artifact contains.
        """
        reason = brief(reason, LONGEST_REASON)
        public = public or reason
        if self._status.model is not None:
            _log.error("%s: the previously loaded version still serves; its replacement failed: %s", self.label, reason)
            text = f"the previously loaded version still serves; its replacement failed: {public}"
            self._status = replace(self._status, reason=text)
            self.series.replacement_failed(True)
            return public
        _log.error("%s is unavailable: %s", self.label, reason)
        self.series.ready(False)
        self._status = _Status("unavailable", public)
        return public

    def set_aside(self, reason: str) -> Generation | None:
        """Note that this version is not loaded, for ``reason``, and that the server need not wait for it.

        Returns the generation that answered, if any, for closing.
        """
        self.awaited = False
        self.series.ready(False)
        self.series.replacement_failed(False)
        with self._order_lock:
            self._order = None
        return self.withdraw(reason)

    def withdraw(self, reason: str) -> Generation | None:
        """Let nothing answer from now on. Returns the generation that did, for closing."""
        model, self._status = self._status.model, _Status("unavailable", reason)
        return model


Slots: TypeAlias = Mapping[str, Mapping[int, Slot]]


class SlotTable:
    """All slots by name and version. Requests read it without a lock; it is changed under the reconciler's lock.

    ``ready_when_empty``: the server needs no ready model to be ready.
    """

    def __init__(self, metrics: Metrics, *, ready_when_empty: bool = False) -> None:
        self.slots: Slots = {}  # by name and version, ascending; replaced as a whole, so that readers need no lock
        self._metrics = metrics
        self._ready_when_empty = ready_when_empty

    @property
    def ready(self) -> bool:
        """Whether all slots are ready that the server waits for, and at least one unless it may be empty.

        Slots added to a ready server are not waited for: neither a slow load nor a half-copied directory may make
        clients lose a server that serves them.
        """
        slots = self.all()
        if not self._ready_when_empty and not any(slot.state == "ready" for slot in slots):
            return False
        return all(slot.state == "ready" for slot in slots if slot.awaited)

    def all(self) -> list[Slot]:
        return [slot for versions in self.slots.values() for slot in versions.values()]

    def of(self, name: str) -> Mapping[int, Slot]:
        """Return the slots of one model, by version."""
        return self.slots.get(name, {})

    def others(self, desired: DesiredModel) -> list[Slot]:
        """Return the model's slots that are not for ``desired``."""
        return [slot for slot in self.of(desired.name).values() if slot.version not in desired.reported_versions]

    def add(self, desired: DesiredModel, *, awaited: bool) -> None:
        """Add a slot for every version of ``desired`` that has none."""
        known = self.of(desired.name)
        versions = [version for version in desired.reported_versions if version not in known]
        new = {v: Slot(desired.name, v, self._metrics.add(desired.name, v), awaited=awaited) for v in versions}
        for each in desired.failed:
            if (slot := new.get(each.plan.version)) is not None:
                slot.set_aside(f"{each.reason}; {desired.instead}")
        if new:
            all_versions = dict(sorted({**known, **new}.items()))
            self.slots = dict(sorted({**self.slots, desired.name: all_versions}.items()))

    def remove(self, name: str, gone: tuple[Slot, ...]) -> None:
        """Remove these slots of a model."""
        kept = {version: slot for version, slot in self.of(name).items() if slot not in gone}
        self.slots = {each: versions for each, versions in {**self.slots, name: kept}.items() if versions}
