"""The golden gate: compares a runtime's outputs for the golden samples with the budget, and schedules these runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bf16kit.drift.metrics import Breach, Budget, DriftSummary, compare
from bf16kit.drift.slices import Scales
from bf16kit.messages.errors import ArtifactError
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.service.contract import Array
from bf16kit.service.drift.contract import DriftVerdict

#: ``error``: the samples could not be run.
Outcome = Literal["passed", "failed", "error"]
RETRY_SECONDS = 60.0  # after a gate that did not pass: damaged memory stays damaged, but a device may recover
MIN_INTERVAL_SECONDS = 10.0  # between two gates: a runtime that always fails must not run the samples all the time
_EDGE = 0.25  # share of a process's time slot at each end in which the gate does not begin


def run_in_parts(
    run: Callable[[Mapping[str, Array]], dict[str, Array]],
    feeds: Mapping[str, Array],
    batch_axis: int | None,
    most_rows: int,
) -> dict[str, Array]:
    """Run ``feeds`` with at most ``most_rows`` rows at a time, and return the outputs as of one run.

    All rows run at once without a batch axis, or if the parts' outputs do not fit together: then they depend on more
    than their own rows.
    """
    rows = 0 if batch_axis is None else next(iter(feeds.values())).shape[batch_axis]
    if batch_axis is None or rows <= most_rows:
        return run(feeds)
    before = (slice(None),) * batch_axis
    parts: list[dict[str, Array]] = []
    for start in range(0, rows, most_rows):
        part = (*before, slice(start, start + most_rows))
        parts.append(run({name: np.ascontiguousarray(array[part]) for name, array in feeds.items()}))
    try:
        outputs = {name: np.concatenate([part[name] for part in parts], batch_axis) for name in parts[0]}
    except ValueError:  # other dimensions differ
        return run(feeds)
    return outputs if all(array.shape[batch_axis] == rows for array in outputs.values()) else run(feeds)


def judge(
    expected: Mapping[str, Array],
    actual: Mapping[str, Array],
    specs: Sequence[TensorSpec],
    batch_axis: int | None,
    budget: Budget,
    scales: Mapping[str, Scales],
) -> tuple[list[Breach], str]:
    """Return every breach of the budget, and each output's drift as text; ``scales`` are what slices are judged by.

    Raises ArtifactError if the golden samples lack an output, or hold it in another shape than the model's.
    """
    breaches: list[Breach] = []
    summaries: list[str] = []
    for spec in specs:
        if spec.name not in expected:
            raise ArtifactError(f"the golden samples hold no output {spec.name!r}; convert the checkpoint again")
        reference, served = expected[spec.name], actual[spec.name]
        if reference.shape != served.shape:
            raise ArtifactError(
                f"the golden samples' output {spec.name!r} has shape {list(reference.shape)}, and the model gives"
                f" {list(served.shape)}; convert the checkpoint again"
            )
        summary = DriftSummary.joined([compare(reference, served, spec, batch_axis, scales.get(spec.name))])
        breaches += budget.breaches(spec.name, summary)
        metric = "relative_l2" if "relative_l2" in summary.stats else "max_abs"
        summaries.append(f"{spec.name} {metric} {summary.judged(metric):.2g}")
    return breaches, ", ".join(summaries)


def breach_verdict(
    model: str, version: int, breaches: Sequence[Breach], budget: Budget, rows: int, at: float
) -> DriftVerdict:
    """Return the verdict for a gate that did not pass: over budget, cause ``broken``.

    It cannot be rounding, because the same samples were within budget when the model was loaded. Empty ``breaches``
    mean that the samples could not be run at all. ``rows`` counts the golden samples' rows. ``at`` is the verdict's.
    """
    found = [(budget.ratio(each.metric, each.measured), each) for each in breaches]
    ratio, worst = max(found, key=lambda pair: pair[0], default=(math.inf, Breach("", "", 0.0, 0.0)))
    return DriftVerdict(
        model, version, "over", "broken", worst.output, worst.metric, ratio, ratio, ratio, float(rows), rows, True, at
    )


@dataclass(frozen=True, slots=True)
class ProcessRank:
    """The rank of this process among the server's processes: ``number``, from 0, of ``count``.

    Each process has its own time slot.
    """

    number: int = 0
    count: int = 1


class Timetable:
    """Says when the gate is due.

    It is due once in every ``seconds`` (0: never), at a moment that ``draw`` picks in this process's time slot. It
    is also due after a run that failed, and :data:`RETRY_SECONDS` after a gate that did not pass. Times are
    :func:`time.monotonic` seconds. Any thread may call :meth:`note_failed_run`; the other methods are for one thread.
    """

    def __init__(self, seconds: float, rank: ProcessRank, start: float, draw: Callable[[], float]) -> None:
        self._seconds = seconds
        self._rank = rank
        self._start = start
        self._draw = draw
        self._run_failed = False
        self._last_end = start
        self._retry_at = math.inf
        self._round = 0
        self._scheduled = self._time_in_round(0) if seconds else math.inf

    def note_failed_run(self) -> None:
        """Note that a run has failed, so the device's outputs should be checked."""
        self._run_failed = True

    def due_reason(self, now: float) -> str:
        """Return why the gate is due now; "" if it is not."""
        if self._run_failed and now >= self._last_end + MIN_INTERVAL_SECONDS:
            return "after a run that failed"
        if now >= self._retry_at:
            return "again, for it was not passed"
        return "on schedule" if now >= self._scheduled else ""

    def begin(self) -> None:
        """Note that the gate starts. A run that fails from now on makes it due again."""
        self._run_failed = False

    def end(self, now: float, outcome: Outcome) -> None:
        """Note that the gate has ended with ``outcome``, and schedule the next one."""
        self._last_end = now
        self._retry_at = math.inf if outcome == "passed" else now + RETRY_SECONDS
        while self._scheduled <= now:
            self._round += 1
            self._scheduled = self._time_in_round(self._round)

    def _time_in_round(self, number: int) -> float:
        share = _EDGE + (1 - 2 * _EDGE) * self._draw()
        return self._start + self._seconds * (number + (self._rank.number + share) / self._rank.count)
