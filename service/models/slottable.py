"""The table of all slots. Requests read it without a lock; it is changed under the reconciler's lock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from service.models.plan import DesiredModel
from service.models.slot import Slot
from service.telemetry.metrics import Metrics

Slots = Mapping[str, Mapping[int, Slot]]


class SlotTable:
    """All slots by name and version. ``ready_when_empty``: the server needs no ready model to be ready."""

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

    def was_tried(self, desired: DesiredModel) -> bool:
        """Return whether ``desired``, whose versions have slots, has been tried as far as possible.

        That is so if each plan was the last one tried in its slot, and nothing is left to unload.
        """
        slots = self.of(desired.name)
        return (
            all(slots[plan.version].tried == plan for plan in desired.plans)
            and all(slots[version].model is None for version in desired.failed_versions)
            and not self.surplus(desired)
        )

    def surplus(self, desired: DesiredModel) -> list[Slot]:
        """Return the slots of the model that are not needed for ``desired``, once its plans have been tried.

        If none of them is served, all others stay. With the policy ``latest``, as many others stay as were not loaded.
        """
        slots = self.of(desired.name)
        others = [slot for version, slot in slots.items() if version not in desired.reported_versions]
        if not desired.plans:
            return others
        if not any(slots[plan.version].serves(plan) for plan in desired.plans):
            return []
        missing = sum(slots[plan.version].state != "ready" for plan in desired.plans)
        if missing and desired.plans[0].serving.version_policy.tries_older:
            instead = [slot for slot in others if slot.state == "ready"][-missing:]
            return [slot for slot in others if slot not in instead]
        return others

    def add(self, desired: DesiredModel, *, awaited: bool) -> None:
        """Add a slot for every version of ``desired`` that has none."""
        known = self.of(desired.name)
        versions = [version for version in desired.reported_versions if version not in known]
        new = {v: Slot(desired.name, v, self._metrics.add(desired.name, v), awaited=awaited) for v in versions}
        for each in desired.failed:
            if (slot := new.get(each.plan.version)) is not None:
                slot.set_aside(each.plan, f"{each.reason}; {desired.instead}")
        if new:
            all_versions = dict(sorted({**known, **new}.items()))
            self.slots = dict(sorted({**self.slots, desired.name: all_versions}.items()))

    def remove(self, name: str, gone: Iterable[Slot]) -> None:
        """Remove these slots of a model."""
        removed = tuple(gone)
        kept = {version: slot for version, slot in self.of(name).items() if slot not in removed}
        self.slots = {each: versions for each, versions in {**self.slots, name: kept}.items() if versions}
