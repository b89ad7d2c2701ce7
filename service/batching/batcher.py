"""The batcher: a bounded queue before one runtime, and the executor threads that run it.

Work-conserving: a batch starts as soon as the runtime is idle, with whatever is waiting. An operator who prefers fuller
batches to short waits sets ``max_delay_s``. :class:`~service.batching.queue.Queue` decides what runs next,
:class:`~service.batching.execution.Execution` how it runs; this module has the threads. A request whose client has left
is removed at once. A request whose deadline has passed never runs.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Hashable

from bf16kit.messages.errors import Cancelled, DeadlineExceeded, InputRefused, InvalidRequest, Overloaded, RequestError
from service.batching.execution import (
    CLIENT_LEFT,
    TOO_LATE,
    BatchObserver,
    Execution,
    Pending,
    Run,
    expiry_error,
    invalid_input_error,
    rejection_label,
    signature,
    unloading_error,
)
from service.batching.queue import BatchPolicy, Queue
from service.request import Reply, Request, Timings

_OBSERVE_S = 0.02  # the least time between two run times reported to the queue by inline runs
_ROOM_S = 0.1  # how often a request that waits for room checks that its client is still there
_LONG_S = 5e-4  # a shorter batch is over soon after another thread was woken for it: an extra instance gains nothing


class Batcher:
    """Joins requests into batches and runs them. Call :meth:`start` before the first :meth:`submit`.

    An extra instance runs a batch whose shape no running batch has: it could never join that one, and would wait for
    the end of a longer run (docs/decisions/0061). A request whose shape runs already should wait: joined with others of
    its shape it costs less. :meth:`close` rejects the requests that still wait, and ends the threads.
    """

    def __init__(self, run: Run, policy: BatchPolicy, observer: BatchObserver, *, name: str = "model") -> None:
        self._run = run
        self._policy = policy
        self._inline = policy.inline and policy.max_delay_s == 0
        self._observer = observer
        # The lock guards everything below, down to _closed.
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)  # work for an executor, or the end
        self._wake_extra = threading.Condition(self._lock)  # the same, for executors of extra instances
        self._room = threading.Condition(self._lock)  # room in the queue, for patient requests
        self._queue: Queue[Pending] = Queue(policy)
        self._idle = policy.instances  # batches of any shape that may begin
        self._extra = policy.extra_instances if policy.batch_rows and policy.max_delay_s == 0 else 0
        self._running: list[Hashable] = []  # shapes
        self._closed = False
        self._last_observed = -math.inf
        self._execution = Execution(run, policy.axis, observer)
        roles = [False] * self._idle + [True] * self._extra
        self._threads = [
            threading.Thread(target=self._work, args=(extra,), name=f"{name}-executor-{i}", daemon=True)
            for i, extra in enumerate(roles)
        ]

    def start(self) -> None:
        """Start the threads. Raises RuntimeError if the system cannot start them all; then none is left."""
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self.close()
            raise

    def close(self, deadline: float = math.inf) -> bool:
        """Reject what waits, and end the threads. Returns False if a batch still runs at ``deadline``.

        The thread of such a batch is left. ``deadline`` is in :func:`time.monotonic` seconds.
        """
        with self._lock:
            self._closed = True
            for condition in (self._wake, self._wake_extra, self._room):
                condition.notify_all()
            now = time.monotonic()
            for job in self._queue.clear():
                self._drop(job, unloading_error(), now)
        started = [thread for thread in self._threads if thread.ident is not None]
        for thread in started:
            thread.join(None if deadline == math.inf else max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in started)

    def submit(self, request: Request) -> Reply:
        """Run one request in some batch; block until it is done.

        If nothing waits and the runtime is idle, an ``inline`` batcher runs the request on the calling thread. That
        saves two thread switches, which are most of what a server adds to a small model's latency. It is not for
        runtimes with memory per thread.

        Raises InvalidRequest (more rows than a batch holds, or inputs that the model cannot run on), DeadlineExceeded,
        Cancelled, Overloaded (queue full), Unavailable (closed), or what the runtime raised.
        """
        arrived = time.monotonic()
        expired = expiry_error(request, arrived)
        if expired is not None:
            self._observer.rejected(rejection_label(expired))
            raise expired
        axis, most = self._policy.axis, self._policy.batch_rows
        shape: Hashable = ()
        if most and axis is not None:
            if request.rows > most:
                raise InvalidRequest(f"the request has {request.rows} rows; max_batch_size is {most}")
            shape = signature(request.feeds, axis)
        if self._inline and (extra := self._begin_inline(shape, request.rows)) is not None:
            return self._run_inline(request, shape, arrived, extra)
        return self._await_reply(self._enqueue(Pending(request, arrived, shape)))

    # --- on the caller's thread, without the queue --------------------------------------------------------------------

    def _begin_inline(self, shape: Hashable, rows: int) -> bool | None:
        """Begin a run if nothing waits. Return whether an extra instance runs it; None if it has to wait."""
        with self._lock:
            if len(self._queue) or self._closed:
                return None
            extra = not self._idle
            if extra and not self._fits_extra(shape, rows):
                return None
            self._begin(shape, extra)
            return extra

    def _run_inline(self, request: Request, shape: Hashable, arrived: float, extra: bool) -> Reply:
        try:
            try:
                outputs, precision = self._run(request.feeds, request.outputs)
            finally:
                ended = time.monotonic()
                seconds = ended - arrived
                timings = request.timings = Timings(0.0, 0.0, seconds, 0.0, arrived, arrived, request.rows)
            if ended - self._last_observed > _OBSERVE_S:
                self._last_observed = ended
                self._observe(shape, request.rows, seconds)
            self._observer.executed(1, request.rows, timings)
        except InputRefused as error:
            raise invalid_input_error(error) from error
        finally:
            with self._lock:
                self._end(shape, extra)
                if len(self._queue):
                    self._wake_executor()
        return Reply(outputs, precision)

    # --- in the queue -------------------------------------------------------------------------------------------------

    def _enqueue(self, job: Pending) -> Pending:
        with self._lock:
            self._expire(job.arrived)
            while not self._put(job):
                self._room.wait(_ROOM_S)
            self._observer.queued(1)
            self._wake_executor(job)
        return job

    def _put(self, job: Pending) -> bool:
        """Put the job into the queue. Returns False if there is no room and the request is patient; else raises."""
        request = job.request
        if self._closed:
            self._observer.rejected("draining")
            raise unloading_error()
        now = time.monotonic()
        expired = expiry_error(request, now) if request.waits_for_room else None  # it may have waited for room for long
        if expired is not None:
            job.set_timings(now)
            self._observer.rejected(rejection_label(expired))
            raise expired
        try:
            self._queue.put(job)
        except Overloaded as error:
            if request.waits_for_room:
                return False
            self._observer.rejected(error.reason)
            raise
        return True

    def _await_reply(self, job: Pending) -> Reply:
        """Wait for the job; at its deadline, or when its client leaves, take it out unless it is already running."""
        cancellation = job.request.cancellation

        def on_cancel() -> None:
            self._withdraw(job, Cancelled(CLIENT_LEFT))

        if cancellation is not None:
            cancellation.subscribe(on_cancel)
        try:
            if not job.wait():
                self._withdraw(job, DeadlineExceeded(TOO_LATE))
            return job.result()
        finally:
            if cancellation is not None:
                cancellation.unsubscribe(on_cancel)

    def _withdraw(self, job: Pending, error: RequestError) -> None:
        """Fail a job that still waits; do nothing if it runs already."""
        with self._lock:
            if self._queue.remove(job):
                self._drop(job, error, time.monotonic())

    def _expire(self, now: float) -> None:
        for job in self._queue.expire(now):
            self._drop(job, DeadlineExceeded(TOO_LATE), now)

    def _drop(self, job: Pending, error: RequestError, now: float) -> None:
        """Fail a job that has left the queue without having run."""
        job.set_timings(now)
        self._observer.queued(-1)
        self._observer.rejected(rejection_label(error))
        job.fail(error)

    # --- the executors ------------------------------------------------------------------------------------------------

    def _work(self, extra: bool) -> None:
        """Run batches on one executor thread, which looks for its next batch itself: nothing needs to wake it.

        Extra instances have threads of their own. So all other batches stay on the same thread: two threads that took
        turns were slower.
        """
        while batch := self._next_batch(extra):
            try:
                self._execution.run(batch, self._observe)
            finally:
                with self._lock:
                    self._end(batch[0].shape, extra)

    def _next_batch(self, extra: bool) -> list[Pending]:
        """Block until there is a batch, and return it; return an empty list when the batcher is closed."""
        wake = self._wake_extra if extra else self._wake
        with self._lock:
            while not self._closed:
                now = time.monotonic()
                self._expire(now)
                batch = self._queue.pop_batch(now, self._fits if extra else self._is_idle)
                if batch:
                    self._begin(batch[0].shape, extra)
                    self._room.notify(len(batch))  # as many places are free now; hundreds may wait for one
                    self._observer.queued(-len(batch))
                    self._wake_executor()
                    return batch
                wakeup = self._queue.next_wakeup(now) if self._idle and not extra else None
                wake.wait(None if wakeup is None else wakeup - now)
            return []

    def _wake_executor(self, job: Pending | None = None) -> None:
        """Wake an executor if one may run ``job``, or without ``job`` the first one in the queue."""
        if self._idle:
            self._wake.notify()
        elif self._extra and (job := job or self._queue.first(time.monotonic())) and self._fits(job):
            self._wake_extra.notify()

    def _observe(self, shape: Hashable, rows: int, seconds: float) -> None:
        """Tell the queue how long a batch ran: it estimates the wait of other requests from that."""
        with self._lock:
            self._queue.pace.observe(shape, rows, seconds)

    # --- instances; the caller has the lock ---------------------------------------------------------------------------

    def _begin(self, shape: Hashable, extra: bool) -> None:
        self._running.append(shape)
        self._count(-1, extra)

    def _end(self, shape: Hashable, extra: bool) -> None:
        self._running.remove(shape)
        self._count(1, extra)

    def _count(self, change: int, extra: bool) -> None:
        if extra:
            self._extra += change
        else:
            self._idle += change

    def _is_idle(self, _: Pending) -> bool:
        return self._idle > 0

    def _fits(self, job: Pending) -> bool:
        return self._fits_extra(job.shape, job.rows)

    def _fits_extra(self, shape: Hashable, rows: int) -> bool:
        """Return whether an extra instance may run such a batch now. It must be long enough to gain anything."""
        return self._extra > 0 and shape not in self._running and self._queue.pace.seconds(shape, rows) >= _LONG_S
