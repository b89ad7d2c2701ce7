"""The batcher: a bounded queue before one runtime, and the executor threads that run it.

Work-conserving: a batch starts as soon as the runtime is idle, with whatever is waiting. An operator who prefers fuller
batches to short waits sets ``max_delay_s``. :class:`~bf16kit.service.batching.queue.Queue` decides what runs next,
:class:`~bf16kit.service.batching.execution.Execution` how it runs; this module has the threads. A request whose client
has left is removed at once. A request whose deadline has passed never runs.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Hashable, Iterable
from functools import partial

from bf16kit.messages.errors import Cancelled, DeadlineExceeded, InvalidRequest, Overloaded, RequestError
from bf16kit.service.batching.execution import (
    CLIENT_LEFT,
    TOO_LATE,
    BatchObserver,
    Execution,
    Pending,
    Run,
    expiry_error,
    rejection_label,
    signature,
    unloading_error,
)
from bf16kit.service.batching.queue import BatchPolicy, Queue
from bf16kit.service.request import Done, Request

_ROOM_S = 0.1  # how often a request that waits for room checks that its client is still there
_LONGEST_WAIT_S = 3600.0  # a client may set a deadline that is later than any wait can be
LONG_S = 5e-4  # a shorter batch is over soon after another thread was woken for it: an extra instance gains nothing


class Batcher:
    """Joins requests into batches and runs them. Call :meth:`start` before the first :meth:`begin`.

    The thread that has run a batch also answers its requests. With a spare thread, the next batch runs meanwhile.

    An extra instance runs a batch whose shape no running batch has: it could never join that one, and would wait for
    the end of a longer run (docs/decisions/0052). A request whose shape runs already should wait: joined with others of
    its shape it costs less. :meth:`close` rejects the requests that still wait, and ends the threads.
    """

    def __init__(self, run: Run, policy: BatchPolicy, observer: BatchObserver, *, name: str = "model") -> None:
        self._policy = policy
        self._observer = observer
        # The lock guards everything below, down to _closed. No request is answered under it.
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)  # work for an executor, or the end
        self._room = threading.Condition(self._lock)  # room in the queue, for requests that wait for it
        self._queue: Queue[Pending] = Queue(policy)
        self._idle = policy.instances  # batches of any shape that may begin
        self._extra = policy.extra_instances if policy.batch_rows and policy.max_delay_s == 0 else 0
        self._running: list[Hashable] = []  # shapes
        self._closed = False
        self._notified = False  # an executor has been woken, and has not looked at the queue yet
        self._execution = Execution(run, policy.axis, observer)
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-executor-{i}", daemon=True)
            for i in range(self._idle + self._extra + policy.spare_threads)
        ]
        self._answering = 0  # threads that will look at the queue in a moment, without being woken
        self._answer_s = 0.0  # seconds that the last response took

    def start(self) -> None:
        """Start the threads. Raises RuntimeError if the system cannot start them all; then none is left."""
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self.close()
            raise

    def close(self, deadline: float = math.inf) -> bool:
        """Reject what waits, and end the threads. Returns False if a batch still runs at ``deadline`` (monotonic)."""
        with self._lock:
            self._closed = True
            self._wake.notify_all()
            self._room.notify_all()
            waiting = [self._drop(job, unloading_error()) for job in self._queue.clear()]
        _answer(waiting)
        started = [thread for thread in self._threads if thread.ident is not None]
        for thread in started:
            thread.join(None if deadline == math.inf else max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in started)

    def begin(self, request: Request, done: Done) -> None:
        """Queue one request. ``done`` gets its reply or its error, once: see :data:`bf16kit.service.request.Done`.

        Blocks only a request that waits for room in the queue. Raises InvalidRequest (more rows than a batch holds),
        DeadlineExceeded, Cancelled, Overloaded (queue full) or Unavailable (closed); then ``done`` is not called.
        """
        now = time.monotonic()
        axis, most = self._policy.axis, self._policy.batch_rows
        shape: Hashable = ()
        if most and axis is not None:
            if request.rows > most:
                raise InvalidRequest(f"the request has {request.rows} rows; max_batch_size is {most}")
            shape = signature(request.feeds, axis)
        job = Pending(request, now, shape, done)
        cancellation = request.cancellation
        if cancellation is not None:
            job.on_cancel = partial(self._withdraw, job)
            cancellation.subscribe(job.on_cancel)
        if now >= self._queue.earliest_deadline:
            with self._lock:
                expired = self._expire(now)
            _answer(expired)
        with self._lock:
            earliest = self._queue.earliest_deadline
            try:
                while not self._put(job):
                    self._room.wait(_ROOM_S)
                    earliest = self._queue.earliest_deadline
            except RequestError as error:
                if request.waits_for_room:
                    job.set_timings(time.monotonic())
                self._observer.rejected(rejection_label(error))
                job.forget_client()
                raise
            self._wake_executor(job)
            if self._queue.earliest_deadline < earliest and not (self._notified or self._answering):
                self._wake.notify()  # a thread that waits for the deadline

    # --- the queue; the caller has the lock ---------------------------------------------------------------------------

    def _put(self, job: Pending) -> bool:
        """Put the job into the queue. Returns False if there is no room and the request waits for it; else raises."""
        error = unloading_error() if self._closed else expiry_error(job.request, time.monotonic())
        if error is not None:
            raise error
        try:
            self._queue.put(job)
        except Overloaded:
            if job.request.waits_for_room:
                return False
            raise
        self._observer.queued(1)
        return True

    def _expire(self, now: float) -> list[Pending]:
        return [self._drop(job, DeadlineExceeded(TOO_LATE)) for job in self._queue.expire(now)]

    def _drop(self, job: Pending, error: RequestError) -> Pending:
        """Fail a job that has left the queue without having run. It is still to be answered."""
        job.set_timings(time.monotonic())
        self._observer.queued(-1)
        self._observer.rejected(rejection_label(error))
        job.result = error
        return job

    def _withdraw(self, job: Pending) -> None:
        """Fail a job whose client has left, if it still waits; it runs to its end if it runs already."""
        with self._lock:
            dropped = [self._drop(job, Cancelled(CLIENT_LEFT))] if self._queue.remove(job) else []
        _answer(dropped)

    # --- the executors ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        answering = False
        while (found := self._next_batch(answering=answering)) is not None:
            answering = self._run(*found)
            found = None  # an idle thread keeps no batch in memory

    def _run(self, batch: list[Pending], extra: bool) -> bool:
        """Run a batch, and answer it. Return whether this thread counts as answering until it looks for the next."""
        answering = False
        for answered, more in self._execution.run(batch, self._observe):
            if not more:
                answering = self._end(batch, extra)
            started = time.monotonic()
            _answer(answered)
            if answered:
                self._answer_s = (time.monotonic() - started) / len(answered)
        return answering

    def _next_batch(self, *, answering: bool) -> tuple[list[Pending], bool] | None:
        """Wait for a batch; return it, and whether an extra instance runs it. None: the batcher is closed."""
        while True:
            with self._lock:
                self._notified = False
                self._answering -= answering
                answering = False
                if self._closed:
                    return None
                now = time.monotonic()
                expired = self._expire(now)
                extra = not self._idle
                batch = self._queue.pop_batch(now, self._fits if extra else None)
                if batch:
                    self._running.append(batch[0].shape)
                    self._count(-1, extra)
                    self._room.notify(len(batch))  # as many places are free now; hundreds may wait for one
                    self._observer.queued(-len(batch))
                    self._wake_executor()
                    if len(self._queue) and self._queue.earliest_deadline < math.inf and not self._notified:
                        self._wake.notify()  # to wait for the deadline: this thread does so no longer
                elif not expired:
                    wakeup = self._queue.next_wakeup(now, waits=bool(self._idle))
                    self._wake.wait(None if wakeup == math.inf else min(wakeup - now, _LONGEST_WAIT_S))
            _answer(expired)
            if batch:
                return batch, extra

    def _wake_executor(self, job: Pending | None = None) -> None:
        """Wake an executor if one may run ``job``, or without ``job`` the first one in the queue."""
        if self._notified or not (self._idle or self._extra):
            return
        job = job or self._queue.first(time.monotonic())
        if self._deserves_waking(job):
            self._notified = True
            self._wake.notify()

    def _deserves_waking(self, job: Pending | None) -> bool:
        """Return whether to wake a thread: while another is about to look, that takes as long as a short batch.

        Without a ``job`` that may run now, one thread has to wait for the end of a delay.
        """
        if job is None:
            return len(self._queue) > 0
        if not (self._idle or self._fits(job)):
            return False
        return not self._answering or not self._queue.pace.settled or self._is_long(job)

    def _observe(self, shape: Hashable, rows: int, seconds: float) -> None:
        """Tell the queue how long a batch ran: it estimates the wait of other requests from that."""
        with self._lock:
            self._queue.pace.observe(shape, rows, seconds)

    # --- instances ----------------------------------------------------------------------------------------------------

    def _end(self, batch: list[Pending], extra: bool) -> bool:
        """Free the instance. Return whether the responses take so short that the thread counts as answering."""
        quick = len(batch) * self._answer_s < LONG_S
        with self._lock:
            self._running.remove(batch[0].shape)
            self._count(1, extra)
            self._answering += quick
            self._wake_executor()
        return quick

    def _count(self, change: int, extra: bool) -> None:
        if extra:
            self._extra += change
        else:
            self._idle += change

    def _fits(self, job: Pending) -> bool:
        """Return whether an extra instance may run such a batch now. It must be long enough to gain anything."""
        return self._extra > 0 and job.shape not in self._running and self._is_long(job)

    def _is_long(self, job: Pending) -> bool:
        return self._queue.pace.seconds(job.shape, job.rows) >= LONG_S


def _answer(jobs: Iterable[Pending]) -> None:
    for job in jobs:
        job.answer()
