"""One batch in execution: joins requests, runs them, splits the outputs, and handles failures."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from bf16kit.messages.errors import (
    Cancelled,
    DeadlineExceeded,
    InputRefused,
    InvalidRequest,
    Overloaded,
    RequestError,
    RuntimeFailure,
    Unavailable,
)
from bf16kit.service.batching.queue import Job
from bf16kit.service.contract import Array
from bf16kit.service.request import Done, Reply, Request, Timings

# Takes feeds and the names of the outputs wanted (None = all); returns the outputs and the precision that made them.
Run = Callable[[Mapping[str, Array], Sequence[str] | None], tuple[dict[str, Array], str]]
# Called with the shape, the rows and the run time in seconds of each batch.
OnBatchTimed = Callable[[Hashable, int, float], None]
_log = logging.getLogger(__name__)
TOO_LATE = "the deadline passed before the request ran"
CLIENT_LEFT = "the client left before the request ran"


class BatchObserver(Protocol):
    """Observes what happens in the queue; must be quick and thread-safe."""

    def rejected(self, reason: str) -> None:
        """``reason`` is ``deadline``, ``cancelled``, ``draining``, or the reason of an :class:`Overloaded`."""

    def queued(self, change: int) -> None: ...

    def executed(self, requests: int, rows: int, timings: Timings) -> None:
        """Record one batch that has run. The queue time in ``timings`` has no meaning here."""


class Pending(Job):
    """A request in the queue, as a :class:`Job`. Once it has a ``result``, :meth:`answer` passes that on."""

    __slots__ = ("_done", "on_cancel", "request", "result")

    def __init__(self, request: Request, arrived: float, shape: Hashable, done: Done) -> None:
        deadline = math.inf if request.deadline is None else request.deadline
        nbytes = sum(array.nbytes for array in request.feeds.values())
        super().__init__(arrived, request.rows, shape, deadline, nbytes)
        self.request = request
        self.result: Reply | Exception | None = None
        self.on_cancel: Callable[[], None] | None = None  # subscribed to the request's cancellation
        self._done = done

    def answer(self) -> None:
        """Pass on the result. Never raises: the calling thread must live on."""
        self.forget_client()
        result, self.result = self.result, None  # an error's traceback refers to the batch: no cycle is left
        try:
            self._done(result or RuntimeError("a request ended with neither a reply nor an error"))
        except Exception:  # noqa: BLE001 -- see above
            _log.exception("a request cannot be answered")

    def forget_client(self) -> None:
        """Unsubscribe from the client's cancellation."""
        if self.on_cancel is not None and self.request.cancellation is not None:
            self.request.cancellation.unsubscribe(self.on_cancel)
            self.on_cancel = None  # it has a reference to this job

    def set_timings(self, left: float, started: float = 0.0, ended: float = 0.0) -> None:
        """Set the timings of a request that is about to fail: its queue time, and its run time if it has run."""
        queue, compute = max(0.0, left - self.arrived), ended - started
        self.request.timings = Timings(queue, compute_infer=compute, arrived=self.arrived, batch_started=started)


class Execution:
    """Runs batches; any number of threads may share it. ``axis`` is the axis along which requests are joined."""

    def __init__(self, run: Run, axis: int | None, observer: BatchObserver) -> None:
        self._run = run
        self._axis = axis
        self._observer = observer

    def run(self, batch: list[Pending], on_timed: OnBatchTimed) -> Iterator[tuple[list[Pending], bool]]:
        """Run a batch. Yields jobs that have their results, and whether more of the batch is still to run.

        A batch that fails is halved until each failing job is alone. So each job is answered as early as possible, and
        no client's input fails another client's request.
        """
        taken_at = time.monotonic()
        parts = [batch]
        while parts:
            part = parts.pop()
            started = time.monotonic()
            ended = part
            try:
                self._run_together(part, taken_at, on_timed)
            except Exception as error:  # noqa: BLE001 - the error goes to the clients; this thread must live on
                if len(part) == 1:
                    part[0].set_timings(taken_at, started, time.monotonic())
                    part[0].result = _client_error(error) if isinstance(error, InputRefused) else error
                else:
                    alive, ended = self._still_wanted(part)
                    half = len(alive) // 2
                    parts += [half_part for half_part in (alive[half:], alive[:half]) if half_part]
            yield ended, bool(parts)

    def _still_wanted(self, jobs: list[Pending]) -> tuple[list[Pending], list[Pending]]:
        """Return the jobs whose clients still wait, and the others, which fail."""
        now = time.monotonic()
        alive, dead = [], []
        for job in jobs:
            error = expiry_error(job.request, now)
            if error is None:
                alive.append(job)
            else:
                job.set_timings(now)
                self._observer.rejected(rejection_label(error))
                job.result = error
                dead.append(job)
        return alive, dead

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
            job.result = Reply(part, precision)


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
    """Return each request's rows of its outputs, as views. Raises RuntimeFailure if an output has too few or many."""
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


def _client_error(error: InputRefused) -> InvalidRequest:
    return InvalidRequest(f"the model cannot run on these inputs: {error.reason}")


def expiry_error(request: Request, now: float) -> RequestError | None:
    """Return the error for a request that must not run any more, or None if it may."""
    if request.deadline is not None and request.deadline <= now:
        return DeadlineExceeded(TOO_LATE)
    if request.cancellation is not None and request.cancellation.cancelled:
        return Cancelled(CLIENT_LEFT)
    return None


def rejection_label(error: RequestError) -> str:
    """Return the metrics' name for a request that ended with ``error``."""
    if isinstance(error, Overloaded):
        return error.reason
    if isinstance(error, Unavailable):
        return "draining"
    return "deadline" if isinstance(error, DeadlineExceeded) else "cancelled"
