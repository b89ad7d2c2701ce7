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

#: Without a deadline, a request is ordered as if its deadline were this many seconds after its arrival.
PATIENCE_S = 1.0
# Of the inputs of one model's waiting requests: half of what all requests of a server may hold by default.
_MAX_QUEUE_BYTES = 256 << 20
_WEIGHT = 0.2  # of the newest batch in the pace: about the last ten batches count
#: Batches after which the pace may reject requests. The first runs of a model are slow, since its memory and code are
#: cold, and they have few rows; after this many, the first one has an eighth of the weight.
ENOUGH_BATCHES = 10
_SHAPES = 256  # remembered at most: clients choose the shapes, and must not choose how much memory they take
_Key = tuple[float, int]
_by_key = attrgetter("key")


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """How a model's requests wait and are batched. With ``axis`` None or ``max_rows`` 0 every request runs alone.

    At most ``max_requests`` wait, with inputs of ``max_bytes``, and none with an expected wait over ``max_wait_s``.
    ``instances`` batches run at once, and ``extra_instances`` more of shapes that no running batch has; these only if
    ``max_delay_s`` is 0. There are ``spare_threads`` more threads than batches: one runs the next batch while another
    sends responses, and waits for the deadlines of requests behind a batch that runs.
    """

    axis: int | None = None
    max_rows: int = 0
    max_delay_s: float = 0.0
    max_requests: int = 128
    max_wait_s: float = math.inf
    max_bytes: int = _MAX_QUEUE_BYTES
    instances: int = 1
    extra_instances: int = 0
    spare_threads: int = 1

    @property
    def batch_rows(self) -> int:
        """The most rows of a batch; 0: every request runs alone."""
        return 0 if self.axis is None else self.max_rows


@dataclass(slots=True, eq=False)
class Job:
    """A request in the queue. ``shape`` tells which requests may share a batch; ``deadline`` is ``inf`` for none."""

    arrived: float
    rows: int = 1
    shape: Hashable = ()
    deadline: float = math.inf
    nbytes: int = 0
    key: _Key = (0.0, 0)  # set by the queue: its place in the order
    cost: float = 0.0  # set by the queue: the expected run time in seconds
    queued: bool = False  # set by the queue: whether it is queued


J = TypeVar("J", bound=Job)


class Pace:
    """The measured speed of a model: seconds per row by shape, each a moving average over past batches."""

    def __init__(self) -> None:
        self._overall: float | None = None
        self._batches = 0  # observed, up to ENOUGH_BATCHES
        self._by_shape: dict[Hashable, float] = {}

    def observe(self, shape: Hashable, rows: int, seconds: float) -> None:
        """Record that a batch of ``rows`` rows of this shape ran for ``seconds``."""
        per_row = seconds / max(rows, 1)
        self._overall = _moving_average(self._overall, per_row)
        self._batches = min(self._batches + 1, ENOUGH_BATCHES)
        known = self._by_shape.pop(shape, None)
        if known is None and len(self._by_shape) >= _SHAPES:
            del self._by_shape[next(iter(self._by_shape))]  # the shape that has not run for the longest time
        self._by_shape[shape] = _moving_average(known, per_row)

    def seconds(self, shape: Hashable, rows: int) -> float:
        """Return the expected run time of ``rows`` rows of this shape in seconds; 0 while nothing has run."""
        per_row = self._by_shape.get(shape, self._overall)
        return 0.0 if per_row is None else per_row * max(rows, 1)

    @property
    def settled(self) -> bool:
        """Whether enough batches have run for a limit to be judged by their pace."""
        return self._batches == ENOUGH_BATCHES


def _moving_average(average: float | None, value: float) -> float:
    return value if average is None else average + _WEIGHT * (value - average)


@dataclass(slots=True)
class _Group(Generic[J]):
    """The jobs of one shape, in order."""

    jobs: list[J] = field(default_factory=list)
    rows: int = 0


class Queue(Generic[J]):
    """Jobs ordered by deadline, then arrival; taken as batches of one shape.

    A job is *due* when it has waited for ``max_delay_s``, or at once if its deadline comes before that. The first due
    job runs next. If none is due, the first job of a full batch of any shape runs next. So no shape waits for another's
    batch to fill, and no shape starves because another's batches are full.

    Report the run time of each batch to :attr:`pace`: the expected wait of other requests is estimated from it. No
    request is rejected for its wait, and none that waits is counted in it, before the pace is settled.
    """

    def __init__(self, policy: BatchPolicy, pace: Pace | None = None) -> None:
        self._policy = policy
        self.pace = Pace() if pace is None else pace
        self._groups: dict[Hashable, _Group[J]] = {}
        self._sequence = itertools.count()
        self._max_rows = policy.batch_rows
        self._count = 0
        self._seconds = 0.0  # expected run time of the waiting jobs
        self._rows = 0
        self._nbytes = 0
        self.earliest_deadline = math.inf  # a lower bound of the deadlines in the queue

    def __len__(self) -> int:
        return self._count

    def put(self, job: J) -> None:
        """Add ``job``. Raises :class:`Overloaded`, which names the limit that is reached."""
        job.cost = self.pace.seconds(job.shape, job.rows) if self.pace.settled else 0.0
        self._check_limits(job)
        job.key = (min(job.deadline, job.arrived + PATIENCE_S), next(self._sequence))
        group = self._groups.get(job.shape)
        if group is None:
            group = self._groups[job.shape] = _Group()
        insort(group.jobs, job, key=_by_key)
        group.rows += job.rows
        self.earliest_deadline = min(self.earliest_deadline, job.deadline)
        self._add(job, 1)

    def remove(self, job: J) -> bool:
        """Remove one job; return False if it is not in the queue (any more)."""
        if not job.queued:
            return False
        group = self._groups[job.shape]
        del group.jobs[bisect_left(group.jobs, job.key, key=_by_key)]
        group.rows -= job.rows
        if not group.jobs:
            del self._groups[job.shape]
        self._add(job, -1)
        return True

    def expire(self, now: float) -> list[J]:
        """Remove and return the jobs whose deadline has passed."""
        if now < self.earliest_deadline:
            return []
        expired = [job for job in self if job.deadline <= now]
        for job in expired:
            self.remove(job)
        self.earliest_deadline = min((job.deadline for job in self), default=math.inf)
        return expired

    def pop_batch(self, now: float, fits: Callable[[J], bool] | None = None) -> list[J]:
        """Remove and return the next batch.

        It is empty if nothing waits, if a fuller batch should be waited for (:meth:`next_wakeup`), or if the job that
        decides the batch does not fit: no other job overtakes it.
        """
        first = self.first(now)
        if first is None or (fits is not None and not fits(first)):
            return []
        batch = [first]
        room = self._max_rows - first.rows
        for job in self._groups[first.shape].jobs if room > 0 else ():
            if job is not first and job.rows <= room:
                batch.append(job)
                room -= job.rows
                if not room:
                    break
        for job in batch:
            self.remove(job)
        return batch

    def first(self, now: float) -> J | None:
        """Return the job that decides the next batch, if one may run now."""
        heads = [group.jobs[0] for group in self._groups.values()]
        if self._policy.max_delay_s == 0 or not self._max_rows:
            return min(heads, key=_by_key, default=None)
        due = min((job for job in self if self._due(job) <= now), key=_by_key, default=None)
        if due is not None:
            return due
        full = (group.jobs[0] for group in self._groups.values() if group.rows >= self._max_rows)
        return min(full, key=_by_key, default=None)

    def next_wakeup(self, now: float, *, waits: bool) -> float:
        """Return when a deadline passes, or, while the runtime ``waits``, a batch is there. ``inf``: never."""
        if not self._groups:
            return math.inf
        if not waits:
            return self.earliest_deadline
        if self.first(now) is not None:
            return now
        return max(now, min(self.earliest_deadline, *(self._due(job) for job in self)))

    def clear(self) -> list[J]:
        """Remove and return all jobs."""
        jobs = list(self)
        for job in jobs:
            self.remove(job)
        return jobs

    def __iter__(self) -> Iterator[J]:
        for group in self._groups.values():
            yield from group.jobs

    # --- inside -------------------------------------------------------------------------------------------------------

    def _check_limits(self, job: J) -> None:
        policy = self._policy
        if self._count >= policy.max_requests:
            raise Overloaded(
                f"the queue is full: {policy.max_requests} requests are waiting (max_queue_size in serving.yaml); try"
                " again later"
            )
        if self._count and self._nbytes + job.nbytes > policy.max_bytes:  # one alone may have more
            raise Overloaded(
                f"the queue is full: inputs of {self._nbytes} bytes are waiting, the limit is {policy.max_bytes}; try"
                " again later",
                "queue_bytes",
            )
        # One batch per instance may always wait: so little shows that batches run now, not that a queue builds up.
        if self._rows + job.rows > policy.instances * max(self._max_rows, 1):
            wait = self._seconds / policy.instances
            if wait > policy.max_wait_s:
                raise Overloaded(
                    f"the queue is full: a request would wait {wait * 1e3:.0f} ms, the limit is"
                    f" {policy.max_wait_s * 1e3:.0f} ms (max_queue_ms in serving.yaml); try again later",
                    "queue_wait",
                )

    def _add(self, job: J, sign: int) -> None:
        job.queued = sign > 0
        self._count += sign
        self._seconds += sign * job.cost
        self._rows += sign * job.rows
        self._nbytes += sign * job.nbytes
        if not self._count:
            self._seconds = 0.0  # drop the rounding error of the sums
            self.earliest_deadline = math.inf

    def _due(self, job: J) -> float:
        until = job.arrived + self._policy.max_delay_s
        return job.arrived if job.deadline <= until else until
