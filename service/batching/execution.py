"""One batch in execution: joins requests, runs them, splits the outputs, and handles failures."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence

from bf16kit.messages.errors import InputRefused
from service.batching.gather import gather, requested_outputs, split
from service.batching.pending import PendingRequest, expiry_error, invalid_input_error, rejection_label
from service.batching.policy import BatchObserver
from service.batching.queue import Job
from service.contract import Array
from service.request import Reply, Timings

# Takes feeds and the names of the outputs wanted (None = all); returns the outputs and the precision that made them.
Run = Callable[[Mapping[str, Array], Sequence[str] | None], tuple[dict[str, Array], str]]
# Called with the shape, the rows and the run time in seconds of each batch.
OnBatchTimed = Callable[[Hashable, int, float], None]
_Job = Job[PendingRequest]


class Execution:
    """Runs batches; any number of threads may share it. ``axis`` is the axis along which requests are joined."""

    def __init__(self, run: Run, axis: int | None, observer: BatchObserver) -> None:
        self._run = run
        self._axis = axis
        self._observer = observer

    def run(self, batch: list[_Job], on_timed: OnBatchTimed) -> None:
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
                    part[0].work.set_timings(part[0].arrived, taken_at, started, time.monotonic())
                    part[0].work.fail(invalid_input_error(error) if isinstance(error, InputRefused) else error)
                    continue
                alive = self._still_wanted(part)
                half = len(alive) // 2
                parts += [half_part for half_part in (alive[half:], alive[:half]) if half_part]

    def _still_wanted(self, jobs: list[_Job]) -> list[_Job]:
        """Return the jobs whose clients still wait; fail the others."""
        now = time.monotonic()
        alive = []
        for job in jobs:
            error = expiry_error(job.work.request, now)
            if error is None:
                alive.append(job)
            else:
                job.work.set_timings(job.arrived, now)
                self._observer.rejected(rejection_label(error))
                job.work.fail(error)
        return alive

    def _run_together(self, batch: list[_Job], taken_at: float, on_timed: OnBatchTimed) -> None:
        requests = [job.work.request for job in batch]
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
            job.work.request.timings = phases.queued(job.arrived, taken_at)
            job.work.succeed(Reply(part, precision))
