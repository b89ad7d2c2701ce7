"""Collects the replicas' reports, and derives from them the models' states and statistics.

The reply to a report is held until the next one is due. That is at once if somebody asks for statistics, so all
replicas report together what they have counted by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from service.contract import GATE_FAILED, State, StatisticsSnapshot
from service.operations import VersionStatistics
from service.peers.channel import from_json
from service.telemetry.counts import add
from service.workers.state import Key, SlotState

_log = logging.getLogger(__name__)
RANK: dict[State, int] = {"ready": 0, "loading": 1, "unavailable": 2}
_PER_SECOND = 100  # reports per second that the front gets, whatever the number of replicas
_SILENT_INTERVALS = 3.5  # intervals without a report after which a replica counts as gone
_SLACK_SECONDS = 3.0
_STATISTICS_SECONDS = 0.9  # after which statistics are answered without the newest counts of the replicas that are late
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
        counted = from_json(tuple[VersionStatistics, ...], fields["statistics"])
        statistics = {(each.name, each.version): each.snapshot for each in counted}
        slots = from_json(tuple[SlotState, ...], fields["slots"])
        return cls(fields["replica"], fields["target"], slots, statistics)


class _LatestReport(NamedTuple):
    """A replica's newest report, and when it came."""

    received: float
    report: Report


class _Round(NamedTuple):
    """A round of reports for which all replicas were asked at once: when, and those that have not reported since."""

    begun: float
    awaited: set[str]


class Reports:
    """The newest report of each live replica, and the totals of those that are gone.

    A version has the state of its best replica, so one that starts or ends does not affect it. ``clock`` returns
    seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._latest: dict[str, _LatestReport] = {}
        self._replied: dict[str, float] = {}  # when each replica got its last reply
        self._held: set[asyncio.Future[None]] = set()  # replies; of the event loop's thread alone
        self._loop: asyncio.AbstractEventLoop | None = None
        self._round: _Round | None = None  # the one under way
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

    async def receive(self, report: Report) -> float:
        """Store a report, and return when the next one is due: the longest time that the reply to that may take."""
        self._loop = asyncio.get_running_loop()
        if not self.store(report):
            held = self._loop.create_future()
            self._held.add(held)
            try:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(held, self.interval)
            finally:
                self._held.discard(held)
        with self._changed:
            if report.replica in self._latest:
                self._replied[report.replica] = self._clock()
        return self.interval

    def store(self, report: Report) -> bool:
        """Store a report. Return whether the next one is due at once, because a round needs a newer one."""
        with self._changed:
            last = self._latest.get(report.replica)
            self._latest[report.replica] = _LatestReport(self._clock(), report)
            for slot in report.slots:
                if slot.state == "unavailable":
                    self._failed[slot.key] = slot
                elif slot.state == "ready":
                    self._failed.pop(slot.key, None)
            due = False
            if self._round is not None and report.replica in self._round.awaited:
                # It was made after the last reply; what came before the round may lack requests that have ended since.
                due = self._replied.get(report.replica, -math.inf) <= self._round.begun
                if not due:
                    self._end_wait(report.replica)
        if last is None or last.report.slots != report.slots:
            self._notify()
        return due

    def forget(self, replica: str, last: Report | None = None) -> None:
        """Remove a replica that has ended, and add its counts to the totals. ``last`` is its last report."""
        with self._changed:
            known = self._latest.pop(replica, None)
            last = last or (known and known.report)
            # A replica that fails soon tells the reason in its last report only.
            self._failed |= {slot.key: slot for slot in (last.slots if last else ()) if slot.state == "unavailable"}
            self._replied.pop(replica, None)
            self._end_wait(replica)
            for key, statistics in ({} if last is None else last.statistics).items():
                self._past[key] = add(self._past.get(key, StatisticsSnapshot()), statistics)
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
        """Return the totals of ``keys`` over all replicas, after each has reported what it counted before this call.

        Replicas that have not after :data:`_STATISTICS_SECONDS` count with their last report, and are logged. There is
        one round of reports at a time; calls that came before it began share it.
        """
        wanted, since = set(keys), self._clock()
        deadline = time.monotonic() + _STATISTICS_SECONDS
        with self._changed:
            self._wait(lambda: self._round is None or self._round.begun >= since, deadline)
            begins = self._round is None
            this = self._begin_round() if self._round is None else self._round
            self._wait(lambda: not this.awaited, deadline)
            if begins:
                self._round = None
                self._changed.notify_all()
                self._log_late(wanted, this.awaited)
            total = {key: self._past.get(key, StatisticsSnapshot()) for key in wanted}
            for latest in self._latest.values():
                for key in wanted & latest.report.statistics.keys():
                    total[key] = add(total[key], latest.report.statistics[key])
        return total

    def _begin_round(self) -> _Round:
        self._round = _Round(self._clock(), set(self._latest))
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._release)
        return self._round

    def _wait(self, condition: Callable[[], bool], deadline: float) -> None:
        self._changed.wait_for(condition, max(0.0, deadline - time.monotonic()))

    def _end_wait(self, replica: str) -> None:
        """Await no report of this replica any more. The caller holds the lock."""
        if self._round is not None:
            self._round.awaited.discard(replica)
            if not self._round.awaited:
                self._changed.notify_all()

    def _log_late(self, wanted: set[Key], awaited: set[str]) -> None:
        found = [each for each in self._latest.values() if any(slot.key in wanted for slot in each.report.slots)]
        late = [each for each in found if each.report.replica in awaited]
        if late:
            _log.warning(
                "ModelStatistics leaves out what %d of %d replicas counted since their last reports, %.1f s ago at"
                " most: they did not report within %.1f s",
                len(late),
                len(found),
                self._clock() - min(each.received for each in late),
                _STATISTICS_SECONDS,
            )

    def _release(self) -> None:
        for held in self._held:
            if not held.done():
                held.set_result(None)

    def _notify(self) -> None:
        for callback in self._callbacks:
            callback()


def _better(slot: SlotState, other: SlotState) -> bool:
    """Return whether ``slot`` is to be shown rather than ``other``; of equals, one whose golden gate failed."""
    if RANK[slot.state] != RANK[other.state]:
        return RANK[slot.state] < RANK[other.state]
    return slot.model is not None and slot.model.golden.startswith(GATE_FAILED)
