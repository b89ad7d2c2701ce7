"""The queue of a model: which requests may wait, which run next, and which share a batch. No threads, locks or clock.

The owner guards the queue with a lock and passes the time to every method, so that tests can choose the time.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, TypeVar

from bf16kit.messages.errors import Overloaded
from service.batching.pace import Pace

#: A request without a deadline goes before those whose deadline is later than this many seconds after its arrival.
PATIENCE_S = 1.0
Work = TypeVar("Work")
_Key = tuple[int, float, int]
_by_key = attrgetter("key")


def _always(_: object) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class LevelPolicy:
    """The limits of one priority level. ``max_wait_s`` limits the expected wait of a request, in seconds."""

    max_requests: int = 128
    max_wait_s: float = math.inf


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """The limits of a queue. With ``max_rows`` 0 every request runs alone.

    ``levels`` starts with the most urgent, and is never empty.
    """

    max_rows: int = 0
    max_delay_s: float = 0.0
    max_bytes: int = 1 << 62  # of the inputs of all waiting requests
    instances: int = 1  # batches that run at once
    levels: tuple[LevelPolicy, ...] = (LevelPolicy(),)


@dataclass(slots=True, eq=False)
class Job(Generic[Work]):
    """A request in the queue. ``shape`` tells which requests may share a batch; ``deadline`` is ``inf`` for none."""

    work: Work
    arrived: float
    rows: int = 1
    shape: Hashable = ()
    deadline: float = math.inf
    level: int = 0
    nbytes: int = 0
    key: _Key = (0, 0.0, 0)  # set by the queue: its place in the order
    cost: float = 0.0  # set by the queue: the expected run time in seconds
    queued: bool = False  # set by the queue: whether it is queued


@dataclass(slots=True)
class _Group(Generic[Work]):
    """The jobs of one shape, in order."""

    jobs: list[Job[Work]] = field(default_factory=list)
    rows: int = 0


class Queue(Generic[Work]):
    """Jobs ordered by level, then deadline, then arrival; taken as batches of one shape.

    A job is *due* when it has waited for ``max_delay_s``, or at once if its deadline comes before that. The first due
    job runs next. If none is due, the first job of a full batch of any shape runs next. So no shape waits for another's
    batch to fill, and no shape starves because another's batches are full.

    Report the run time of each batch to :attr:`pace`: the expected wait of other requests is estimated from it. No
    request is rejected for its wait, and none that waits is counted in it, before the pace is settled.
    """

    def __init__(self, policy: QueuePolicy, pace: Pace | None = None) -> None:
        self._policy = policy
        self.pace = Pace() if pace is None else pace
        self._groups: dict[Hashable, _Group[Work]] = {}
        self._sequence = itertools.count()
        self._counts = [0] * len(policy.levels)
        self._seconds = [0.0] * len(policy.levels)  # expected run time of the waiting jobs, by level
        self._rows = 0
        self._nbytes = 0
        self._earliest_deadline = math.inf  # a lower bound of the deadlines in the queue

    def __len__(self) -> int:
        return sum(self._counts)

    def put(self, job: Job[Work]) -> None:
        """Add ``job``. Raises :class:`Overloaded`, which names the limit that is reached."""
        job.cost = self.pace.seconds(job.shape, job.rows) if self.pace.settled else 0.0
        self._check_limits(job)
        urgency = min(job.deadline, job.arrived + PATIENCE_S)
        job.key = (job.level, urgency, next(self._sequence))
        group = self._groups.get(job.shape)
        if group is None:
            group = self._groups[job.shape] = _Group()
        insort(group.jobs, job, key=_by_key)
        group.rows += job.rows
        self._earliest_deadline = min(self._earliest_deadline, job.deadline)
        self._count(job, 1)

    def remove(self, job: Job[Work]) -> bool:
        """Remove one job; return False if it is not in the queue (any more)."""
        if not job.queued:
            return False
        group = self._groups[job.shape]
        del group.jobs[bisect_left(group.jobs, job.key, key=_by_key)]
        group.rows -= job.rows
        if not group.jobs:
            del self._groups[job.shape]
        self._count(job, -1)
        return True

    def expire(self, now: float) -> list[Job[Work]]:
        """Remove and return the jobs whose deadline has passed."""
        if now < self._earliest_deadline:
            return []
        expired = [job for job in self if job.deadline <= now]
        for job in expired:
            self.remove(job)
        self._earliest_deadline = min((job.deadline for job in self), default=math.inf)
        return expired

    def pop_batch(self, now: float, fits: Callable[[Job[Work]], bool] = _always) -> list[Job[Work]]:
        """Remove and return the next batch.

        It is empty if nothing waits, if a fuller batch should be waited for (:meth:`next_wakeup`), or if the job that
        decides the batch does not fit: no other job overtakes it.
        """
        first = self.first(now)
        if first is None or not fits(first):
            return []
        batch = [first]
        room = self._policy.max_rows - first.rows
        for job in self._groups[first.shape].jobs if room > 0 else ():
            if job is not first and job.rows <= room:
                batch.append(job)
                room -= job.rows
                if not room:
                    break
        for job in batch:
            self.remove(job)
        return batch

    def first(self, now: float) -> Job[Work] | None:
        """Return the job that decides the next batch, if one may run now."""
        heads = [group.jobs[0] for group in self._groups.values()]
        if self._policy.max_delay_s == 0 or not self._policy.max_rows:
            return min(heads, key=_by_key, default=None)
        due = min((job for job in self if self._due(job) <= now), key=_by_key, default=None)
        if due is not None:
            return due
        full = (group.jobs[0] for group in self._groups.values() if group.rows >= self._policy.max_rows)
        return min(full, key=_by_key, default=None)

    def next_wakeup(self, now: float) -> float | None:
        """Return when :meth:`pop_batch` will have a batch if no job is added; None if nothing waits."""
        if not self._groups:
            return None
        if self.first(now) is not None:
            return now
        return max(now, min(self._due(job) for job in self))

    def clear(self) -> list[Job[Work]]:
        """Remove and return all jobs."""
        jobs = list(self)
        for job in jobs:
            self.remove(job)
        return jobs

    def __iter__(self) -> Iterator[Job[Work]]:
        for group in self._groups.values():
            yield from group.jobs

    # --- inside -------------------------------------------------------------------------------------------------------

    def _check_limits(self, job: Job[Work]) -> None:
        level = self._policy.levels[job.level]
        if self._counts[job.level] >= level.max_requests:
            raise Overloaded(
                f"the queue is full: {level.max_requests} requests are waiting (max_queue_size in"
                " serving.yaml); try again later"
            )
        if self._nbytes + job.nbytes > self._policy.max_bytes:
            raise Overloaded(
                f"the queue is full: inputs of {self._nbytes} bytes are waiting, the limit is"
                f" {self._policy.max_bytes}; try again later",
                "queue_bytes",
            )
        # One batch per instance may always wait: so little shows that batches run now, not that a queue builds up.
        if self._rows + job.rows > self._policy.instances * max(self._policy.max_rows, 1):
            wait = sum(self._seconds[: job.level + 1]) / self._policy.instances
            if wait > level.max_wait_s:
                raise Overloaded(
                    f"the queue is full: a request would wait {wait * 1e3:.0f} ms, the limit is"
                    f" {level.max_wait_s * 1e3:.0f} ms (max_queue_ms in serving.yaml); try again later",
                    "queue_wait",
                )

    def _count(self, job: Job[Work], sign: int) -> None:
        job.queued = sign > 0
        self._counts[job.level] += sign
        self._seconds[job.level] += sign * job.cost
        self._rows += sign * job.rows
        self._nbytes += sign * job.nbytes
        if not self._counts[job.level]:
            self._seconds[job.level] = 0.0  # drop the rounding error of the sums

    def _due(self, job: Job[Work]) -> float:
        until = job.arrived + self._policy.max_delay_s
        return job.arrived if job.deadline <= until else until
