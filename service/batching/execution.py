"""One batch in execution: joins requests, runs them, splits the outputs, and handles failures."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Literal, Protocol

import numpy as np

from bf16kit.messages.errors import (
    Cancelled,
    DeadlineExceeded,
    InputRefused,
    InvalidRequest,
    RequestError,
    RuntimeFailure,
    Unavailable,
)
from service.batching.queue import Job
from service.contract import Array
from service.request import Reply, Request, Timings

# Takes feeds and the names of the outputs wanted (None = all); returns the outputs and the precision that made them.
Run = Callable[[Mapping[str, Array], Sequence[str] | None], tuple[dict[str, Array], str]]
# Called with the shape, the rows and the run time in seconds of each batch.
OnBatchTimed = Callable[[Hashable, int, float], None]
TOO_LATE = "the deadline passed before the request ran"
CLIENT_LEFT = "the client left before the request ran"


class BatchObserver(Protocol):
    """Observes what happens in the queue; must be quick and thread-safe."""

    def rejected(self, reason: str) -> None:
        """Count a rejected request.

        ``reason`` is ``deadline``, ``cancelled``, ``draining``, or the reason of an :class:`Overloaded`.
        """
        ...

    def queued(self, change: int) -> None: ...

    def executed(self, requests: int, rows: int, timings: Timings) -> None:
        """Record one batch that has run. The queue time in ``timings`` has no meaning here."""
        ...


class Pending(Job):
    """A request in the queue whose caller waits for the result, as a :class:`Job`.

    ``_done`` is locked from the start; releasing it wakes the one thread that waits.
    """

    __slots__ = ("_done", "_error", "_reply", "request")

    def __init__(self, request: Request, arrived: float, shape: Hashable) -> None:
        deadline = math.inf if request.deadline is None else request.deadline
        nbytes = sum(array.nbytes for array in request.feeds.values())
        super().__init__(arrived, request.rows, shape, deadline, nbytes)
        self.request = request
        self._reply: Reply | None = None
        self._error: Exception | None = None
        self._done = threading.Lock()
        self._done.acquire()

    def succeed(self, reply: Reply) -> None:
        self._reply = reply
        self._done.release()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._done.release()

    def set_timings(self, left: float, started: float = 0.0, ended: float = 0.0) -> None:
        """Set the timings of a request that is about to fail: its queue time, and its run time if it has run."""
        queue, compute = max(0.0, left - self.arrived), ended - started
        self.request.timings = Timings(queue, compute_infer=compute, arrived=self.arrived, batch_started=started)

    def wait(self) -> bool:
        """Wait until the result is there, or the deadline has passed. Return whether the result is there."""
        if self.deadline == math.inf:
            return self._done.acquire()
        return self._done.acquire(timeout=min(max(0.0, self.deadline - time.monotonic()), threading.TIMEOUT_MAX))

    def result(self) -> Reply:
        """Return the reply, or raise the error, once it is there."""
        if self._error is None and self._reply is None:
            self._done.acquire()
        if self._error is not None:
            raise self._error
        if self._reply is None:
            raise RuntimeError("a call ended with neither a reply nor an error")
        return self._reply


class Execution:
    """Runs batches; any number of threads may share it. ``axis`` is the axis along which requests are joined."""

    def __init__(self, run: Run, axis: int | None, observer: BatchObserver) -> None:
        self._run = run
        self._axis = axis
        self._observer = observer

    def run(self, batch: list[Pending], on_timed: OnBatchTimed) -> None:
        """Answer or fail every job of a batch.

        A batch that fails is halved until each failing job is alone. So each job is answered as early as possible, and
        no client's input fails another client's request.
        """
        taken_at = time.monotonic()
        parts = [batch]
        while parts:
            part = parts.pop()
            started = time.monotonic()
            try:
                self._run_together(part, taken_at, on_timed)
            except Exception as error:  # noqa: BLE001 - the error goes to the clients; this thread must live on
                if len(part) == 1:
                    part[0].set_timings(taken_at, started, time.monotonic())
                    part[0].fail(invalid_input_error(error) if isinstance(error, InputRefused) else error)
                    continue
                alive = self._still_wanted(part)
                half = len(alive) // 2
                parts += [half_part for half_part in (alive[half:], alive[:half]) if half_part]

    def _still_wanted(self, jobs: list[Pending]) -> list[Pending]:
        """Return the jobs whose clients still wait; fail the others."""
        now = time.monotonic()
        alive = []
        for job in jobs:
            error = expiry_error(job.request, now)
            if error is None:
                alive.append(job)
            else:
                job.set_timings(now)
                self._observer.rejected(rejection_label(error))
                job.fail(error)
        return alive

    def _run_together(self, batch: list[Pending], taken_at: float, on_timed: OnBatchTimed) -> None:
        requests = [job.request for job in batch]
        started = time.monotonic()
        feeds = gather(requests, self._axis)
        gathered = time.monotonic()
        outputs, precision = self._run(feeds, requested_outputs(requests))
        ran = time.monotonic()
        parts = split(outputs, requests, self._axis)
        done = time.monotonic()
        rows = sum(job.rows for job in batch)
        phases = Timings(0.0, gathered - started, ran - gathered, done - ran, batch_started=started, rows=rows)
        on_timed(batch[0].shape, rows, done - started)
        self._observer.executed(len(batch), rows, phases)
        for job, part in zip(batch, parts, strict=True):
            job.request.timings = phases.queued(job.arrived, taken_at)
            job.succeed(Reply(part, precision))


def signature(feeds: Mapping[str, Array], axis: int) -> Hashable:
    """Return what must be equal for two requests to share a batch: dtypes, and shapes without the batch axis."""
    return frozenset(
        [(name, array.dtype.char, array.shape[:axis], array.shape[axis + 1 :]) for name, array in feeds.items()]
    )


def gather(requests: Sequence[Request], axis: int | None) -> Mapping[str, Array]:
    """Return one feed per input, with the requests joined along ``axis``; a single request's feeds are not copied."""
    if len(requests) == 1 or axis is None:
        return requests[0].feeds
    return {
        name: np.concatenate([request.feeds[name] for request in requests], axis=axis) for name in requests[0].feeds
    }


def requested_outputs(requests: Sequence[Request]) -> tuple[str, ...] | None:
    """Return the outputs to compute: all that any request asks for, in order of asking; None = all."""
    if len(requests) == 1:
        return requests[0].outputs
    names: dict[str, None] = {}
    for request in requests:
        if request.outputs is None:
            return None
        names.update(dict.fromkeys(request.outputs))
    return tuple(names)


def split(outputs: dict[str, Array], requests: Sequence[Request], axis: int | None) -> list[dict[str, Array]]:
    """Return each request's rows of the outputs it asked for, as views.

    Raises RuntimeFailure if an output does not have the batch's number of rows.
    """
    if len(requests) == 1 or axis is None:
        return [outputs]
    total = sum(request.rows for request in requests)
    for name, array in outputs.items():
        if array.ndim <= axis or array.shape[axis] != total:
            raise RuntimeFailure(f"output {name!r} has shape {list(array.shape)} for a batch of {total} rows")
    parts: list[dict[str, Array]] = []
    start = 0
    for request in requests:
        window = (slice(None),) * axis + (slice(start, start + request.rows),)
        names = outputs if request.outputs is None else request.outputs
        parts.append({name: outputs[name][window] for name in names})
        start += request.rows
    return parts


def unloading_error() -> Unavailable:
    """Return the error for requests that wait, or arrive, when the batcher is closed."""
    return Unavailable("the model is being unloaded; try again later", "draining")


def invalid_input_error(error: InputRefused) -> InvalidRequest:
    """Return the error for the client whose inputs the runtime has rejected."""
    return InvalidRequest(f"the model cannot run on these inputs: {error.reason}")


def expiry_error(request: Request, now: float) -> RequestError | None:
    """Return the error for a request that must not run any more, or None if it may."""
    if request.deadline is not None and request.deadline <= now:
        return DeadlineExceeded(TOO_LATE)
    if request.cancellation is not None and request.cancellation.cancelled:
        return Cancelled(CLIENT_LEFT)
    return None


def rejection_label(error: RequestError) -> Literal["deadline", "cancelled", "draining"]:
    """Return the metrics' name for a request that ended with ``error``."""
    if isinstance(error, Unavailable):
        return "draining"
    return "deadline" if isinstance(error, DeadlineExceeded) else "cancelled"
