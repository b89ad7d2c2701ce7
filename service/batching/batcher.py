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
from service.batching.claim import IdleClaim, RunTimePredictor
from service.batching.execution import Execution, Run
from service.batching.gather import signature
from service.batching.pending import (
    CLIENT_LEFT,
    TOO_LATE,
    PendingRequest,
    expiry_error,
    invalid_input_error,
    lock_timeout,
    rejection_label,
    unloading_error,
)
from service.batching.policy import BatchObserver, BatchPolicy
from service.batching.queue import Job, Queue
from service.batching.slots import ExecutionSlots
from service.request import Reply, Request, Timings

_OBSERVE_S = 0.02  # the least time between two run times reported to the queue by inline runs
_ROOM_S = 0.1  # how often a request that waits for room checks that its client is still there
_LONG_S = 5e-4  # a shorter batch is over soon after another thread was woken for it: beside others it gains nothing
_Job = Job[PendingRequest]


class Batcher:
    """Joins requests into batches and runs them. Call :meth:`start` before the first :meth:`submit`.

    :meth:`close` rejects the requests that still wait, and ends the threads.
    """

    def __init__(self, run: Run, policy: BatchPolicy, observer: BatchObserver, *, name: str = "model") -> None:
        self._run = run
        self._policy = policy
        self._inline = policy.inline and policy.max_delay_s == 0
        self._observer = observer
        self._queue: Queue[PendingRequest] = Queue(policy.queue_policy())
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)  # work for an executor, or the end
        self._wake_beside = threading.Condition(self._lock)  # the same, for executors of batches beside others
        self._room = threading.Condition(self._lock)  # room in the queue, for patient requests
        self._slots = ExecutionSlots(
            policy.instances, policy.beside if policy.batching_enabled and policy.max_delay_s == 0 else 0
        )
        self._last_observed = -math.inf
        self._predictor = RunTimePredictor()
        self._execution = Execution(run, policy.axis, observer)
        self._closed = False
        roles = [False] * policy.instances + [True] * self._slots.beside
        self._threads = [
            threading.Thread(target=self._work, args=(beside,), name=f"{name}-executor-{i}", daemon=True)
            for i, beside in enumerate(roles)
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
        with self._wake:
            self._closed = True
            self._wake.notify_all()
            self._wake_beside.notify_all()
            self._room.notify_all()
            now = time.monotonic()
            dropped = self._queue.clear()
            for job in dropped:
                self._record_dropped(job, unloading_error(), now)
        for job in dropped:
            job.work.fail(unloading_error())
        started = [thread for thread in self._threads if thread.ident is not None]
        for thread in started:
            thread.join(None if deadline == math.inf else max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in started)

    def submit(self, request: Request) -> Reply:
        """Run one request in some batch; block until it is done.

        If nothing waits and the runtime is idle, an ``inline`` batcher runs the request on the calling thread. That
        saves two thread switches, which are most of what a server adds to a small model's latency. It is not for
        runtimes with memory per thread.

        Raises InvalidRequest (more rows than a batch holds, no such priority, or inputs that the model cannot run on),
        DeadlineExceeded, Cancelled, Overloaded (queue full), Unavailable (closed), or what the runtime raised.
        """
        arrived = time.monotonic()
        expired = expiry_error(request, arrived)
        if expired is not None:
            self._observer.rejected(rejection_label(expired))
            raise expired
        if self._policy.batching_enabled and request.rows > self._policy.max_rows:
            raise InvalidRequest(f"the request has {request.rows} rows; max_batch_size is {self._policy.max_rows}")
        level = self._level(request.priority)
        claimed = isinstance(request.claim, IdleClaim) and request.claim.use(self.release)
        if claimed or (self._inline and self._claim_idle(request)):
            return self._run_inline(request, arrived)
        shape = self._shape(request)
        if self._inline and self._claim_beside(request, shape):
            return self._run_inline(request, arrived)
        job = self._enqueue(request, shape, arrived, level)
        return self._await_reply(job)

    def claim(self, nbytes: int) -> IdleClaim | None:
        """See :meth:`service.contract.Model.claim`."""
        quick = self._policy.claimable and self._predictor.is_quick(nbytes)
        return IdleClaim(self.release) if quick and self._claim_idle() else None

    def release(self, request: Request | None = None) -> None:
        """End a run outside the executors, or a claim that was not used. Wakes an executor if requests wait."""
        with self._lock:
            self._slots.caller_finished(request)
            if len(self._queue):
                self._wake_executor()

    # --- the client's side --------------------------------------------------------------------------------------------

    def _level(self, priority: int) -> int:
        levels = len(self._policy.levels)
        if levels == 1:  # no priorities: all requests share one level
            return 0
        if not 0 <= priority <= levels:
            raise InvalidRequest(f"priority is {priority}, expected 0 (the default) to {levels} (the least urgent)")
        return (priority or self._policy.default_level) - 1

    def _claim_idle(self, request: Request | None = None) -> bool:
        with self._lock:
            if len(self._queue) or not self._slots.idle or self._closed:
                return False
            self._slots.caller_started(request)
            return True

    def _claim_beside(self, request: Request, shape: Hashable) -> bool:
        with self._lock:
            if len(self._queue) or self._closed or not self._fits_beside(shape, request.rows):
                return False
            self._slots.caller_started(request)
            return True

    def _run_inline(self, request: Request, arrived: float) -> Reply:
        cpu_start = time.thread_time()
        try:
            try:
                outputs, precision = self._run(request.feeds, request.outputs)
            finally:
                ended = time.monotonic()
                timings = request.timings = Timings(0.0, 0.0, ended - arrived, 0.0, arrived, arrived, request.rows)
                self._predictor.observe(request.nbytes, time.thread_time() - cpu_start)
            if ended - self._last_observed > _OBSERVE_S:
                self._last_observed = ended
                self._observe(self._shape(request), request.rows, timings.compute_infer)
            self._observer.executed(1, request.rows, timings)
        except InputRefused as error:
            raise invalid_input_error(error) from error
        finally:
            self.release(request)
        return Reply(outputs, precision)

    def _observe(self, shape: Hashable, rows: int, seconds: float) -> None:
        """Tell the queue how long a batch ran: it estimates the wait of other requests from that."""
        with self._lock:
            self._queue.pace.observe(shape, rows, seconds)

    def _fits_beside(self, shape: Hashable, rows: int) -> bool:
        """Return whether such a batch may begin beside those that run. It must be long enough to gain anything."""
        return self._queue.pace.seconds(shape, rows) >= _LONG_S and self._slots.fits(shape, self._shape)

    def _shape(self, request: Request) -> Hashable:
        """Return what must be equal for two requests to share a batch."""
        axis = self._policy.axis
        return signature(request.feeds, axis) if self._policy.batching_enabled and axis is not None else ()

    def _enqueue(self, request: Request, shape: Hashable, arrived: float, level: int) -> _Job:
        job: _Job = Job(
            PendingRequest(request),
            arrived,
            rows=request.rows,
            shape=shape,
            deadline=math.inf if request.deadline is None else request.deadline,
            level=level,
            nbytes=sum(array.nbytes for array in request.feeds.values()),
        )
        with self._wake:
            self._expire(arrived)
            while not self._put(job):
                self._room.wait(_ROOM_S)
            self._observer.queued(1)
            self._wake_executor(job)
        return job

    def _put(self, job: _Job) -> bool:
        """Put the job into the queue. Returns False if there is no room and the request is patient; else raises."""
        request = job.work.request
        if self._closed:
            self._observer.rejected("draining")
            raise unloading_error()
        now = time.monotonic()
        expired = expiry_error(request, now) if request.waits_for_room else None  # it may have waited for room for long
        if expired is not None:
            job.work.set_timings(job.arrived, now)
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

    def _await_reply(self, job: _Job) -> Reply:
        """Wait for the job; at its deadline, or when its client leaves, take it out unless it is already running."""
        cancellation = job.work.request.cancellation

        def on_cancel() -> None:
            self._withdraw(job, Cancelled(CLIENT_LEFT))

        if cancellation is not None:
            cancellation.subscribe(on_cancel)
        try:
            if not job.work.wait(lock_timeout(job.deadline)):
                self._withdraw(job, DeadlineExceeded(TOO_LATE))
                job.work.wait(-1)
            return job.work.result()
        finally:
            if cancellation is not None:
                cancellation.unsubscribe(on_cancel)

    def _withdraw(self, job: _Job, error: RequestError) -> None:
        """Fail a job that still waits; do nothing if it runs already."""
        with self._lock:
            if not self._queue.remove(job):
                return
            self._record_dropped(job, error, time.monotonic())
        job.work.fail(error)

    # --- the executors' side ------------------------------------------------------------------------------------------

    def _work(self, beside: bool) -> None:
        """Run batches on one executor thread, which looks for its next batch itself: nothing needs to wake it.

        Batches beside others have threads of their own. So all other batches stay on the same thread: two threads that
        took turns were slower.
        """
        while batch := self._next_batch(beside):
            try:
                self._execution.run(batch, self._observe)
            finally:
                with self._lock:
                    self._slots.batch_ended(batch[0].shape, beside)

    def _next_batch(self, beside: bool) -> list[_Job]:
        """Block until there is a batch, and return it; return an empty list when the batcher is closed."""
        wake = self._wake_beside if beside else self._wake
        with self._lock:
            while not self._closed:
                now = time.monotonic()
                self._expire(now)
                batch = self._queue.pop_batch(now, self._fits if beside else self._idle)
                if batch:
                    self._slots.batch_started(batch[0].shape, beside)
                    self._room.notify_all()
                    self._observer.queued(-len(batch))
                    self._wake_executor()
                    return batch
                wakeup = self._queue.next_wakeup(now) if self._slots.idle and not beside else None
                wake.wait(None if wakeup is None else wakeup - now)
            return []

    def _wake_executor(self, job: _Job | None = None) -> None:
        """Wake an executor if one may run ``job``, or without ``job`` the first one in the queue."""
        if self._slots.idle:
            self._wake.notify()
        elif self._slots.beside and (job := job or self._queue.first(time.monotonic())) and self._fits(job):
            self._wake_beside.notify()

    def _idle(self, _: _Job) -> bool:
        return self._slots.idle

    def _fits(self, job: _Job) -> bool:
        return self._fits_beside(job.shape, job.rows)

    def _expire(self, now: float) -> None:
        for job in self._queue.expire(now):
            error = DeadlineExceeded(TOO_LATE)
            self._record_dropped(job, error, now)
            job.work.fail(error)

    def _record_dropped(self, job: _Job, error: RequestError, now: float) -> None:
        """Record that a job has left the queue without having run."""
        job.work.set_timings(job.arrived, now)
        self._observer.queued(-1)
        self._observer.rejected(rejection_label(error))
