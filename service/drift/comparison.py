"""Compares live outputs with the fp32 reference's: the drift of each sample, and the verdict on recent samples."""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from bf16kit.drift import OF_VECTORS, Budget, OutputDrift, SampleDrift
from bf16kit.errors import ArtifactError
from bf16kit.tensors import TensorSpec
from service.contract import Array
from service.drift.calibration import Calibration
from service.drift.census import RangeChecker
from service.drift.detector import LEARNING_ROWS, Detector, Expected
from service.drift.diagnosis import diagnose, worst_cause
from service.drift.liveslices import LiveSlices, estimate
from service.drift.observer import DriftObserver
from service.drift.recent import REQUESTS, Estimate, RecentRows, Window, estimates
from service.drift.sampling import Sample
from service.drift.verdict import Cause, DriftVerdict, State

_log = logging.getLogger(__name__)
_WEIGHTS = 256  # requests whose weights decide which weight is common


class _OutputVerdict(NamedTuple):
    """The verdict on one output after its newest sample."""

    estimates: list[Estimate]
    cause: Cause
    effective: float


class _Output:
    """Recent drift of one output, and its detector."""

    def __init__(self, spec: TensorSpec, slices: LiveSlices, expected: Expected | None, outputs: int) -> None:
        self.spec = spec
        self.slices = slices
        self.recent = RecentRows()
        self.detector = Detector(expected, outputs)
        self.verdict = _OutputVerdict([], "none", 0.0)
        self.newest = 0  # number of the last request that asked for this output

    def restart(self) -> None:
        self.recent = RecentRows()
        self.slices.restart()
        self.detector.restart()
        self.verdict = _OutputVerdict([], "none", 0.0)

    def update_verdict(self, window: Window, found: list[Estimate]) -> None:
        unhealthy = self.detector.alarm or any(each.low > 1 for each in found)
        cause = diagnose(window, self.detector.expected) if unhealthy else "none"
        self.verdict = _OutputVerdict(found, cause, window.size)


class _CommonWeight:
    """The weights of the newest requests, sorted, to find the weight of a common request."""

    def __init__(self) -> None:
        self._newest: deque[float] = deque()
        self._ordered: list[float] = []

    def add(self, weight: float) -> None:
        if len(self._newest) == _WEIGHTS:
            del self._ordered[bisect_left(self._ordered, self._newest.popleft())]
        self._newest.append(weight)
        insort(self._ordered, weight)

    @property
    def high(self) -> float:
        """The 90th percentile: the smallest weight with nine tenths of the others at or below it."""
        return self._ordered[math.ceil(0.9 * (len(self._ordered) - 1))]


class Comparison:
    """Live drift of one model version. For one thread only, except :meth:`verdict`."""

    def __init__(
        self,
        outputs: Sequence[TensorSpec],
        batch_axis: int | None,
        budget: Budget,
        *,
        model: str = "",
        version: int = 0,
        calibration: Calibration | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``calibration`` holds the expected drift; without it the expected drift is learnt from live samples.
        ``clock`` returns Unix seconds."""
        self._specs = outputs
        self._batch_axis = batch_axis
        self._budget = budget
        self._label = f"model {model!r} version {version}"
        self._calibration = calibration or Calibration()
        self._clock = clock
        self._ranges = RangeChecker(self._calibration.ranges, batch_axis)
        self._profile: str | None = None
        self._outputs: dict[str, _Output] = {}
        self._common = _CommonWeight()
        self._samples = self._requests = 0
        self._verdict = DriftVerdict.unknown(model, version)

    def verdict(self) -> DriftVerdict:
        """Return the verdict after the newest sample."""
        return self._verdict

    def restart(self) -> None:
        """Forget recent drift and the detectors' sums, because another precision answers now.

        The expected drift is kept.
        """
        for output in self._outputs.values():
            output.restart()
        self._samples = 0
        self._verdict = DriftVerdict.unknown(self._verdict.model, self._verdict.version)

    def observe(self, expected: Mapping[str, Array], sample: Sample, observer: DriftObserver) -> None:
        """Compare one request's outputs with the reference's. Outputs that the request did not ask for are skipped.

        Raises ArtifactError if a reference output has no rows; then none of the request's outputs count.
        """
        if self._profile != sample.profile:
            self._start_profile(sample.profile)
        drifts = self._drifts(expected, sample)
        weight = 1.0 / sample.probability
        self._common.add(weight)
        self._requests += 1
        outside = self._outside(sample, observer)
        for name, found in drifts.items():
            self._add(self._outputs[name], found, weight, outside, observer)
        self._samples += sample.rows
        self._verdict = self._new_verdict()
        observer.judged(self._verdict.state == "over", self._verdict.cause)

    def _drifts(self, expected: Mapping[str, Array], sample: Sample) -> dict[str, OutputDrift]:
        found = {}
        for spec in self._specs:
            if spec.name in sample.outputs:
                slices = self._outputs[spec.name].slices
                drift = slices.compare(expected[spec.name], sample.outputs[spec.name])
                if not drift.rows:
                    raise ArtifactError(f"the fp32 reference's output {spec.name!r} has no rows")
                found[spec.name] = drift
        return found

    def _start_profile(self, profile: str) -> None:
        """Start afresh for the sample's profile: another arithmetic answers now, and other drift is expected of it."""
        rows = self._calibration.rows.get(profile, {})
        known = {spec.name: Expected.of(rows.get(spec.name, ()), len(self._specs)) for spec in self._specs}
        if any(expected is None for expected in known.values()):
            _log.info(
                "%s: the spread of drift is learned from the first %d live rows in budget: %s",
                self._label,
                LEARNING_ROWS,
                self._calibration.missing_reason,
            )
        self._profile = profile
        self._outputs = {
            spec.name: _Output(spec, self._new_slices(spec), known[spec.name], len(self._specs)) for spec in self._specs
        }
        self._samples = 0

    def _new_slices(self, spec: TensorSpec) -> LiveSlices:
        return LiveSlices(spec, self._batch_axis, self._calibration.scales.get(spec.name))

    def _outside(self, sample: Sample, observer: DriftObserver) -> list[bool]:
        """Return for each row of the sample whether any input is outside its range."""
        found = self._ranges.outside(sample.feeds, sample.rows)
        for name, rows in found.items():
            observer.out_of_range(name, int(rows.sum()))  # report 0 as well: it shows that the input has a range
        return [any(row) for row in zip(*found.values(), strict=True)] if found else [False] * sample.rows

    def _add(
        self, output: _Output, drift: OutputDrift, weight: float, outside: list[bool], observer: DriftObserver
    ) -> None:
        name, detector, rows = output.spec.name, output.detector, drift.rows
        for row in rows:
            observer.drift(name, row, weight)
        if len(rows) != len(outside):  # an output without a batch axis depends on all rows
            outside = [any(outside)] * len(rows)
        output.newest = self._requests
        output.recent.add(rows, weight, outside)
        drifts = [row.relative_l2 for row in rows]
        change = detector.add(
            drifts, self._detector_weight(weight), within_budget=drift.scalar or self._within_budget(rows)
        )
        if change:
            output.recent.keep_newest(detector.change_age if change == "risen" else detector.recovery_age)
            output.slices.restart()
        if change == "risen":
            observer.changed(name)
        output.slices.add(drift)
        window = output.recent.window()
        found = [
            each
            for each in estimates(window, self._budget)
            if not (drift.scalar and each.metric.partition(".")[0] in OF_VECTORS)
        ]
        worst, bound = output.slices.worst(), self._budget.bound("slice_error")
        if worst is not None and bound is not None:
            found.append(estimate(self._budget.ratio("slice_error", worst.error), window.size))
            observer.worst_slice(name, worst.axis, worst.index)
        output.update_verdict(window, found)
        for each in found:
            observer.budget_ratio(name, each.metric, each.ratio, each.low, each.high)
        observer.recent(name, window.size, detector.score)

    def _within_budget(self, rows: list[SampleDrift]) -> bool:
        """Whether the expected drift may be learnt from these rows: all of them are within budget."""
        bound = self._budget.bound("relative_l2")
        highest = math.inf if bound is None else bound
        return all(math.isfinite(row.relative_l2) and row.relative_l2 <= highest for row in rows)

    def _detector_weight(self, weight: float) -> float:
        """Return the weight of a request in the detector, at most 1.

        A request of a kind that is sampled more often than a common one counts less, in proportion.
        """
        return min(1.0, weight / self._common.high)

    def _new_verdict(self) -> DriftVerdict:
        # An output that none of the last REQUESTS requests asked for has no recent drift.
        outputs = [each for each in self._outputs.values() if each.newest > self._requests - REQUESTS]
        bounds = [(output, each) for output in outputs for each in output.verdict.estimates]
        over = [pair for pair in bounds if pair[1].low > 1]
        undecided = [pair for pair in bounds if not pair[1].high <= 1]
        state: State = "over" if over else "unknown" if undecided or not bounds else "within"
        output, nearest = max(over or undecided or bounds, key=lambda pair: pair[1].ratio, default=(None, None))
        return DriftVerdict(
            model=self._verdict.model,
            version=self._verdict.version,
            state=state,
            cause=worst_cause([each.verdict.cause for each in outputs]),
            output=output.spec.name if output else "",
            metric=nearest.metric if nearest else "",
            ratio=nearest.ratio if nearest else 0.0,
            low=nearest.low if nearest else 0.0,
            high=nearest.high if nearest else math.inf,
            effective_samples=output.verdict.effective if output else 0.0,
            samples=self._samples,
            changed=any(each.detector.alarm for each in outputs),
            at=self._clock(),
        )
