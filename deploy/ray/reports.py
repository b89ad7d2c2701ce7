"""Collects the replicas' reports, and derives from them the models' states and statistics."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from bf16kit.errors import NotFound, Unavailable
from bf16kit.wording import quoted
from service.contract import GATE_FAILED, Model, Slot, State, StatisticsSnapshot
from service.models.repository import parse_version
from service.operations import RegistryModels, VersionStatistics
from service.workers.description import ModelDescription, SummedStatistics
from service.workers.overview import OverviewSlot
from service.workers.statistics import add, from_json
from service.workers.view import Key, SlotState

_RANK: dict[State, int] = {"ready": 0, "loading": 1, "unavailable": 2}
_PER_SECOND = 100  # reports per second that the front gets, whatever the number of replicas
_SILENT_INTERVALS = 3.5  # intervals without a report after which a replica counts as gone
_SLACK_SECONDS = 3.0
ModelVersions = Mapping[str, Sequence[int]]  # versions by model


@dataclass(frozen=True, slots=True)
class Report:
    """One replica's report. ``target`` is the address at which it is scraped, empty if it is not."""

    replica: str
    target: str
    slots: tuple[SlotState, ...]
    statistics: Mapping[Key, StatisticsSnapshot]

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Report:
        slots = tuple(SlotState(*slot) for slot in fields["slots"])
        return cls(fields["replica"], fields["target"], slots, from_json(fields["statistics"]))


class _LatestReport(NamedTuple):
    """A replica's newest report: when it came, and when the one before it came (-inf: there was none)."""

    received: float
    previous: float
    report: Report


class Reports:
    """The newest report of each live replica, and the totals of those that are gone.

    A version has the state of its best replica, so one that starts or ends does not affect it. ``clock`` returns
    seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._latest: dict[str, _LatestReport] = {}
        self._past: dict[Key, StatisticsSnapshot] = {}
        self._failed: dict[Key, SlotState] = {}  # reports of replicas that could not be started
        self._retired = False
        self._wanted: ModelVersions = {}
        self._callbacks: list[Callable[[], None]] = []

    @property
    def interval(self) -> float:
        """Seconds between two reports of one replica."""
        return max(1.0, len(self._latest) / _PER_SECOND)

    def subscribe(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    @property
    def retired(self) -> bool:
        return self._retired

    def retire(self) -> None:
        """Be not ready from now on, so that load balancers send no more requests."""
        self._retired = True
        self._notify()

    def set_models(self, wanted: ModelVersions) -> None:
        """Set what is to be served, whether or not a replica has reported it."""
        with self._changed:
            self._wanted = dict(wanted)
            self._failed = {key: slot for key, slot in self._failed.items() if key[1] in wanted.get(key[0], ())}
        self._notify()

    def receive(self, report: Report) -> float:
        """Store a report; return the seconds until the next one is due."""
        with self._changed:
            last = self._latest.get(report.replica)
            previous = -math.inf if last is None else last.received
            self._latest[report.replica] = _LatestReport(self._clock(), previous, report)
            for slot in report.slots:
                if slot.state == "unavailable":
                    self._failed[slot.key] = slot
                elif slot.state == "ready":
                    self._failed.pop(slot.key, None)
            self._changed.notify_all()
        self._notify()
        return self.interval

    def forget(self, replica: str) -> None:
        """Remove a replica that has ended, and add its counts to the totals."""
        with self._changed:
            last = self._latest.pop(replica, None)
            for key, statistics in ({} if last is None else last.report.statistics).items():
                self._past[key] = add(self._past.get(key, StatisticsSnapshot()), statistics)
            self._changed.notify_all()
        self._notify()

    def maintain(self) -> None:
        """Forget replicas that no longer report."""
        oldest = self._clock() - _SILENT_INTERVALS * self.interval - _SLACK_SECONDS
        for replica in [name for name, latest in list(self._latest.items()) if latest.received < oldest]:
            self.forget(replica)

    def reports(self) -> list[Report]:
        with self._changed:
            return [latest.report for latest in self._latest.values()]

    def slots(self) -> dict[Key, SlotState]:
        """Return the state of each wanted version by name and version, ascending."""
        found: dict[Key, SlotState] = {
            (name, version): SlotState(name, version, "loading", "no replica of it has reported yet")
            for name, versions in self._wanted.items()
            for version in versions
        }
        found |= {key: slot for key, slot in list(self._failed.items()) if key in found}
        reported: dict[Key, SlotState] = {}
        for report in self.reports():
            for slot in report.slots:
                if slot.name in self._wanted and (slot.key not in reported or _better(slot, reported[slot.key])):
                    reported[slot.key] = slot
        return dict(sorted({**found, **reported}.items()))

    def totals(self, keys: Iterable[Key]) -> dict[Key, StatisticsSnapshot]:
        """Return the totals of ``keys`` over all replicas, after each has reported twice since this call, or has gone.

        Twice, because the first report may have been on its way, with counts from before a request that has ended.
        """
        wanted, since = set(keys), self._clock()
        involved = {report.replica for report in self.reports() if wanted & {slot.key for slot in report.slots}}

        def all_reported_twice() -> bool:
            return all(self._latest[name].previous > since for name in involved if name in self._latest)

        with self._changed:
            self._changed.wait_for(all_reported_twice, _SILENT_INTERVALS * self.interval)
            total = {key: self._past.get(key, StatisticsSnapshot()) for key in wanted}
            for latest in self._latest.values():
                for key in wanted & latest.report.statistics.keys():
                    total[key] = add(total[key], latest.report.statistics[key])
        return total

    def _notify(self) -> None:
        for callback in self._callbacks:
            callback()


def _better(slot: SlotState, other: SlotState) -> bool:
    """Return whether ``slot`` is to be shown rather than ``other``; of equals, one whose golden gate failed."""
    if _RANK[slot.state] != _RANK[other.state]:
        return _RANK[slot.state] < _RANK[other.state]
    return slot.model is not None and slot.model.get("golden", "").startswith(GATE_FAILED)


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
            return min(found, key=lambda slot: (_RANK[slot.state], -slot.version))
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
        return [_overview_slot(slot) for slot in self._reports.slots().values()]

    def versions(self, name: str) -> list[int]:
        return [slot.version for slot in self.models() if slot.name == name and slot.state == "ready"]

    def subscribe(self, callback: Callable[[], None]) -> None:
        self._reports.subscribe(callback)


def _not_ready(slot: Slot, version: str) -> NotFound:
    """Return the same error as a single server. The reason is only in the index and in the log."""
    which = f"version {slot.version}" if version else "no version"
    return NotFound(f"{which} of model {slot.name!r} is {'not ' if version else ''}ready; its replicas' log says why")


def _overview_slot(slot: SlotState) -> OverviewSlot:
    model = None
    if slot.model is not None:
        model = ModelDescription(slot.name, slot.version, slot.model, SummedStatistics(StatisticsSnapshot))
    return OverviewSlot(slot.name, slot.version, slot.state, slot.reason, model)


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
