"""One batch in execution: joins requests, runs them, splits the outputs, and handles failures."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence

from bf16kit.errors import InputRefused
from service.batching.gather import gather, split, wanted
from service.batching.policy import BatchObserver
from service.batching.queue import Job
from service.batching.waiting import Waiting, invalid, why_over, word
from service.contract import Array
from service.request import Reply, Timings

# Takes feeds and the names of the outputs wanted (None = all); returns the outputs and the precision that made them.
Run = Callable[[Mapping[str, Array], Sequence[str] | None], tuple[dict[str, Array], str]]
# Called with the shape, the rows and the run time in seconds of each batch.
Paced = Callable[[Hashable, int, float], None]
_Job = Job[Waiting]


class Execution:
    """Runs batches; any number of threads may share it. ``axis`` is the axis along which requests are joined."""

    def __init__(self, run: Run, axis: int | None, observer: BatchObserver) -> None:
        self._run = run
        self._axis = axis
        self._observer = observer

    def run(self, batch: list[_Job], paced: Paced) -> None:
        """Answer or fail every job of a batch.

        A batch that fails is halved until each failing job is alone. So each job is answered as early as possible, and
        no client's input fails another client's request.
        """
        taken = time.monotonic()
        parts = [batch]
        while parts:
            part = parts.pop()
            begun = time.monotonic()
            try:
                self._run_together(part, taken, paced)
            except Exception as error:  # noqa: BLE001 - the error goes to the clients; this thread must live on
                if len(part) == 1:
                    part[0].work.stamp(part[0].arrived, taken, begun, time.monotonic())
                    part[0].work.fail(invalid(error) if isinstance(error, InputRefused) else error)
                    continue
                living = self._still_wanted(part)
                half = len(living) // 2
                parts += [half_part for half_part in (living[half:], living[:half]) if half_part]

    def _still_wanted(self, jobs: list[_Job]) -> list[_Job]:
        """Return the jobs whose clients still wait; fail the others."""
        now = time.monotonic()
        living = []
        for job in jobs:
            over = why_over(job.work.request, now)
            if over is None:
                living.append(job)
            else:
                job.work.stamp(job.arrived, now)
                self._observer.rejected(word(over))
                job.work.fail(over)
        return living

    def _run_together(self, batch: list[_Job], taken: float, paced: Paced) -> None:
        requests = [job.work.request for job in batch]
        begun = time.monotonic()
        feeds = gather(requests, self._axis)
        gathered = time.monotonic()
        outputs, precision = self._run(feeds, wanted(requests))
        ran = time.monotonic()
        parts = split(outputs, requests, self._axis)
        done = time.monotonic()
        rows = sum(job.rows for job in batch)
        phases = Timings(0.0, gathered - begun, ran - gathered, done - ran, begun=begun, rows=rows)
        paced(batch[0].shape, rows, done - begun)
        self._observer.executed(len(batch), rows, phases)
        for job, part in zip(batch, parts, strict=True):
            job.work.request.timings = phases.queued(job.arrived, taken)
            job.work.succeed(Reply(part, precision))
