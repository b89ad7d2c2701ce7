"""Requests into batches: a bounded queue before one runtime, and the threads that run it.

Work-conserving: a batch starts as soon as the runtime is idle, with whatever is waiting (or after ``max_delay_s``,
where someone prefers fuller batches to short waits). The oldest request is in every next batch, so none starves. A
request whose caller has left, or whose deadline has passed, is dropped before it runs.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from bf16kit.errors import Cancelled, DeadlineExceeded, InvalidRequest, Overloaded, RequestError, Unavailable
from service.batching.gather import gather, signature, split, wanted
from service.contract import Array, Reply, Request

Run = Callable[[Mapping[str, Array], Sequence[str] | None], dict[str, Array]]

_UNLOADING = "the model is being unloaded; try again later"
_TOO_LATE = "the deadline passed before the request ran"


class BatchObserver(Protocol):
    """Told what happens in the queue; must be quick and thread-safe."""

    def rejected(self, reason: Literal["queue_full", "deadline", "cancelled"]) -> None: ...
    def queued(self, change: int) -> None: ...
    def executed(self, requests: int, rows: int, gather_s: float, run_s: float, split_s: float) -> None: ...


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """``axis`` None or ``max_rows`` 0: every request runs alone. ``inline``: see :meth:`Batcher.submit`."""

    axis: int | None = None
    max_rows: int = 0
    max_delay_s: float = 0.0
    max_queue: int = 256
    instances: int = 1
    inline: bool = False

    @property
    def batches(self) -> bool:
        return self.axis is not None and self.max_rows > 0


class _Job:
    """A request that queues. ``done`` is held from the start; releasing it wakes the one thread that waits."""

    __slots__ = ("arrived", "done", "error", "reply", "request", "signature", "started")

    def __init__(self, request: Request, arrived: float) -> None:
        self.request = request
        self.arrived = self.started = arrived
        self.signature: tuple[object, ...] = ()
        self.reply: Reply | None = None
        self.error: Exception | None = None
        self.done = threading.Lock()
        self.done.acquire()

    def finish(self) -> None:
        self.done.release()

    def result(self) -> Reply:
        if self.error is not None:
            raise self.error
        if self.reply is None:
            raise RuntimeError("a job finished with neither a reply nor an error")
        return self.reply


class Batcher:
    """Start it before the first :meth:`submit`; :meth:`close` refuses what still waits and joins the threads."""

    def __init__(self, run: Run, policy: BatchPolicy, observer: BatchObserver, *, name: str = "model") -> None:
        self._run = run
        self._policy = policy
        self._inline = policy.inline and policy.max_delay_s == 0
        self._observer = observer
        self._queue: deque[_Job] = deque()
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)  # work for an executor, or the end
        self._idle = policy.instances
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-executor-{i}", daemon=True)
            for i in range(policy.instances)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify_all()
            for job in self._queue:
                job.error = Unavailable(_UNLOADING)
                job.finish()
            self._observer.queued(-len(self._queue))
            self._queue.clear()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def submit(self, request: Request) -> Reply:
        """Run one request in some batch; blocks until it is done.

        When nothing waits and the runtime is idle, an ``inline`` batcher runs the request on the calling thread: that
        saves two thread switches, most of what a server adds to a small model. Not for runtimes with memory per thread.

        Raises InvalidRequest (more rows than a batch holds), DeadlineExceeded, Cancelled, Overloaded (queue full),
        Unavailable (closed), or what the runtime raised.
        """
        arrived = time.monotonic()
        dead = self._death(request, arrived)
        if dead is not None:
            raise dead
        if self._policy.batches and request.rows > self._policy.max_rows:
            raise InvalidRequest(f"the request has {request.rows} rows; max_batch_size is {self._policy.max_rows}")
        if self._inline and self._claim_idle():
            try:
                return self._run_inline(request, arrived)
            finally:
                self._release()
        job = _Job(request, arrived)
        self._enqueue(job)
        self._await(job)
        return job.result()

    # --- the caller's side --------------------------------------------------------------------------------------------

    def _claim_idle(self) -> bool:
        with self._lock:
            if self._queue or not self._idle or self._closed:
                return False
            self._idle -= 1
            return True

    def _release(self) -> None:
        with self._lock:
            self._idle += 1
            if self._queue:
                self._wake.notify()

    def _run_inline(self, request: Request, arrived: float) -> Reply:
        outputs = self._run(request.feeds, request.outputs)
        seconds = time.monotonic() - arrived
        self._observer.executed(1, request.rows, 0.0, seconds, 0.0)
        return Reply(outputs, 0.0, seconds)

    def _enqueue(self, job: _Job) -> None:
        if self._policy.batches and self._policy.axis is not None:
            job.signature = signature(job.request.feeds, self._policy.axis)
        with self._wake:
            if self._closed:
                raise Unavailable(_UNLOADING)
            if len(self._queue) >= self._policy.max_queue:
                self._drop_dead(time.monotonic())
            if len(self._queue) >= self._policy.max_queue:
                self._observer.rejected("queue_full")
                raise Overloaded(f"the queue is full: {self._policy.max_queue} requests are waiting; try again later")
            self._queue.append(job)
            self._observer.queued(1)
            if self._idle:
                self._wake.notify()

    def _await(self, job: _Job) -> None:
        """Wait for the job; at its deadline take it out of the queue, unless it is already running."""
        deadline = job.request.deadline
        timeout = -1.0 if deadline is None else min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
        if job.done.acquire(timeout=timeout):
            return
        with self._wake:
            if job in self._queue:
                self._queue.remove(job)
                self._observer.queued(-1)
                self._observer.rejected("deadline")
                raise DeadlineExceeded(_TOO_LATE)
        job.done.acquire()

    # --- the executors' side ------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while batch := self._next_batch():
            try:
                self._execute(batch)
            finally:
                self._release()

    def _next_batch(self) -> list[_Job]:
        """Blocks until there is one; empty when the batcher is closed."""
        with self._wake:
            while not self._closed:
                if not self._queue or not self._idle:
                    self._wake.wait()
                    continue
                patience = self._patience(time.monotonic())
                if patience > 0:
                    self._wake.wait(patience)
                elif batch := self._take(time.monotonic()):
                    self._idle -= 1
                    return batch
            return []

    def _patience(self, now: float) -> float:
        """Seconds to wait for a fuller batch: none when it is full, or the oldest request cannot wait that long."""
        if self._policy.max_delay_s == 0 or not self._policy.batches:
            return 0.0
        oldest = self._queue[0]
        until = oldest.arrived + self._policy.max_delay_s
        if oldest.request.deadline is not None and oldest.request.deadline <= until:
            return 0.0
        rows = sum(job.request.rows for job in self._queue if job.signature == oldest.signature)
        return 0.0 if rows >= self._policy.max_rows else until - now

    def _take(self, now: float) -> list[_Job]:
        """The oldest living request and those that fit beside it; the others keep their places."""
        self._drop_dead(now)
        if not self._queue:
            return []
        batch = [self._queue.popleft()]
        if self._policy.batches:
            self._fill(batch)
        for job in batch:
            job.started = now
        self._observer.queued(-len(batch))
        return batch

    def _fill(self, batch: list[_Job]) -> None:
        room = self._policy.max_rows - batch[0].request.rows
        passed: list[_Job] = []
        while self._queue and room > 0:
            job = self._queue.popleft()
            if job.signature == batch[0].signature and job.request.rows <= room:
                batch.append(job)
                room -= job.request.rows
            else:
                passed.append(job)
        self._queue.extendleft(reversed(passed))

    def _drop_dead(self, now: float) -> None:
        living: deque[_Job] = deque()
        for job in self._queue:
            job.error = self._death(job.request, now)
            if job.error is None:
                living.append(job)
            else:
                job.finish()
        self._observer.queued(len(living) - len(self._queue))
        self._queue = living

    def _death(self, request: Request, now: float) -> RequestError | None:
        """Why this request must not run any more, counted; None when it may."""
        if request.deadline is not None and request.deadline <= now:
            self._observer.rejected("deadline")
            return DeadlineExceeded(_TOO_LATE)
        if request.cancellation is not None and request.cancellation.cancelled:
            self._observer.rejected("cancelled")
            return Cancelled("the caller left before the request ran")
        return None

    def _execute(self, batch: list[_Job]) -> None:
        """Run a batch. One that fails is run again request by request: nobody's input fails another's answer."""
        try:
            self._run_together(batch)
        except Exception as error:  # noqa: BLE001 - whatever it was belongs to the callers; this thread must live on
            for job in batch:
                job.error = error if len(batch) == 1 else self._run_alone(job)
        finally:
            for job in batch:
                job.finish()

    def _run_alone(self, job: _Job) -> Exception | None:
        try:
            self._run_together([job])
        except Exception as error:  # noqa: BLE001 - as above
            return error
        return None

    def _run_together(self, batch: list[_Job]) -> None:
        requests = [job.request for job in batch]
        begun = time.monotonic()
        feeds = gather(requests, self._policy.axis)
        gathered = time.monotonic()
        outputs = self._run(feeds, wanted(requests))
        ran = time.monotonic()
        parts = split(outputs, requests, self._policy.axis)
        done = time.monotonic()
        rows = sum(request.rows for request in requests)
        self._observer.executed(len(batch), rows, gathered - begun, ran - gathered, done - ran)
        for job, part in zip(batch, parts, strict=True):
            job.reply = Reply(part, queue_s=job.started - job.arrived, compute_s=done - begun)
