"""The models that all replicas serve together, as their reports tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

from bf16kit.messages.errors import NotFound, Unavailable
from bf16kit.messages.wording import quoted
from deploy.ray.reports import RANK, Reports
from service.contract import Model, Slot
from service.models.repository import parse_version
from service.operations import RegistryModels, VersionStatistics


class FrontRegistry:
    """Implements :class:`service.contract.Registry`. Nothing runs here: a request that arrives here has no replica."""

    def __init__(self, reports: Reports) -> None:
        self._reports = reports

    @property
    def live(self) -> bool:
        return True

    @property
    def ready(self) -> bool:
        if self._reports.retired:
            return False
        slots = self._reports.slots().values()
        names = {slot.name for slot in slots}
        return bool(names) and names == {slot.name for slot in slots if slot.state == "ready"}

    def acquire(self, name: str, version: str) -> NoReturn:
        slot = self.find(name, version)
        if slot.state == "unavailable":
            raise _not_ready(slot, version)
        reason = "its route is being made" if slot.state == "ready" else "it is loading"
        raise Unavailable(f"model {slot.name!r} version {slot.version} has no replica yet: {reason}; try again later")

    def get(self, name: str, version: str) -> Model:
        slot = self.find(name, version)
        if slot.model is not None:
            return slot.model
        if slot.state == "unavailable":
            raise _not_ready(slot, version)
        raise Unavailable(f"model {slot.name!r} version {slot.version} is loading; try again later")

    def find(self, name: str, version: str) -> Slot:
        wanted = parse_version(version)
        found = [slot for slot in self.models() if slot.name == name]
        if not found:
            raise NotFound(f"unknown model {quoted(name)}")
        if wanted is None:
            return min(found, key=lambda slot: (RANK[slot.state], -slot.version))
        for slot in found:
            if slot.version == wanted:
                return slot
        known = ", ".join(str(slot.version) for slot in found)
        raise NotFound(f"model {name!r} has no version {wanted}; it has {known}")

    def is_ready(self, name: str, version: str) -> bool:
        try:
            return self.find(name, version).state == "ready"
        except NotFound:
            return False

    def models(self) -> Sequence[Slot]:
        return list(self._reports.slots().values())

    def versions(self, name: str) -> list[int]:
        return [slot.version for slot in self.models() if slot.name == name and slot.state == "ready"]

    def subscribe(self, callback: Callable[[], None]) -> None:
        self._reports.subscribe(callback)


def _not_ready(slot: Slot, version: str) -> NotFound:
    """Return the same error as a single server. The reason is only in the index and in the log."""
    which = f"version {slot.version}" if version else "no version"
    return NotFound(f"{which} of model {slot.name!r} is {'not ' if version else ''}ready; its replicas' log says why")


class FrontModels(RegistryModels):
    """Implements :class:`service.operations.Models`: statistics are sums over all replicas."""

    def __init__(self, registry: FrontRegistry, reports: Reports) -> None:
        super().__init__(registry)
        self._reports = reports

    def statistics(self, name: str, version: str) -> Sequence[VersionStatistics]:
        found = super().statistics(name, version)
        totals = self._reports.totals((each.name, each.version) for each in found)
        return [
            VersionStatistics(each.name, each.version, each.device, totals[each.name, each.version]) for each in found
        ]
