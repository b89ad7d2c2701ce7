"""Compares live outputs with the fp32 reference's: the drift of each sample, and the verdict on recent samples.

The verdict is on the model, and its consequences concern all clients, so inputs that no model can answer well do not
count in it. A request for which an output of the reference is not finite is counted and not compared: fp32 itself has
overflowed. (An output that is not finite in the golden samples either, as of a model that masks, is compared.) A
request with inputs outside the calibrated range is compared and judged apart: if such requests alone are over the
budget, the cause is ``out_of_range`` and the state is that of the others.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bf16kit.drift.measurements import InputRange
from bf16kit.drift.metrics import OF_VECTORS, Budget, OutputDrift, SampleDrift, compare, has_slices
from bf16kit.messages.errors import ArtifactError
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.service.contract import Array
from bf16kit.service.drift.contract import Cause, DriftVerdict, State
from bf16kit.service.drift.detector import LEARNING_ROWS, Calibration, Detector, Expected, diagnose, worst_cause
from bf16kit.service.drift.estimates import Estimate, corroborated, estimates, slice_estimate
from bf16kit.service.drift.recent import REQUESTS, LiveSlices, RecentRows, Window
from bf16kit.service.drift.sampler import Sample
from bf16kit.service.telemetry.modelmetrics import ModelMetrics

_log = logging.getLogger(__name__)
Drifts = Mapping[str, Sequence[SampleDrift]]  # of each row, by output


class _Output:
    """Recent drift of one output, its detector, and the verdict on it after its newest sample: ``estimates``, ``over``
    (the bounds that it breaks), ``cause`` and ``effective`` samples."""

    def __init__(self, spec: TensorSpec, slices: LiveSlices, detector: Detector, *, scalar: bool) -> None:
        """``scalar``: it is one number per row, whose relative error depends on how near 0 the requests make it."""
        self.spec, self.slices, self.detector = spec, slices, detector
        self.metric = "max_abs" if scalar else "relative_l2"  # whose rise the detector looks for
        self.newest = 0  # number of the last request that asked for this output
        self.restart()

    def restart(self) -> None:
        self.recent = RecentRows()
        self.apart = RecentRows()  # of requests with inputs outside the calibrated range
        self.apart_over_until = 0  # number of the last request up to which a breach of those counts as recent
        self.slices.restart()
        self.detector.restart()
        self.estimates: list[Estimate] = []
        self.over = frozenset[str]()
        self.cause: Cause = "none"
        self.effective = 0.0

    def judge(self, window: Window, found: list[Estimate]) -> None:
        """Judge ``found``. A breach begins with the wide interval above the budget, and ends with 1 in the narrow one.

        So chance seldom begins it, and it does not come and go while drift stays near the budget.
        """
        self.over = frozenset(
            each.metric for each in found if each.lowest > 1 or (each.low > 1 and each.metric in self.over)
        )
        unhealthy = self.detector.alarm or self.over
        self.cause = diagnose(window, self.detector.expected, self.metric) if unhealthy else "none"
        self.estimates, self.effective = found, window.size


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``calibration`` holds the expected drift; without it the expected drift is learnt from live samples.
        ``clock`` returns seconds of the machine."""
        self._specs = outputs
        self._batch_axis = batch_axis
        self._budget = budget
        self._label = f"model {model!r} version {version}"
        self._calibration = calibration or Calibration()
        self._clock = clock
        self._profile: str | None = None
        self._outputs: dict[str, _Output] = {}
        self._samples = self._requests = 0
        self._verdict = DriftVerdict(model, version)

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
        self._verdict = DriftVerdict(self._verdict.model, self._verdict.version)

    def observe(self, expected: Mapping[str, Array], sample: Sample, metrics: ModelMetrics) -> Drifts | None:
        """Compare one request's outputs with the reference's. Outputs that the request did not ask for are skipped.

        Returns each output's drift, nothing of a request that is judged apart, and None if they cannot be compared
        because an output of the reference is not finite. Raises ArtifactError if a reference output has no rows; then
        none of the request's outputs count.
        """
        outside = self._is_outside(sample, metrics)
        requested = [spec for spec in self._specs if spec.name in sample.outputs]
        if not all(all_finite(expected[s.name]) for s in requested if s.name not in self._calibration.infinite):
            metrics.reference_nonfinite(sample.rows)
            return None
        if self._profile != sample.profile:
            self._start_profile(sample.profile)
        drifts = {spec.name: self._drift(spec, expected, sample, outside) for spec in requested}
        weight = 1.0 / sample.probability
        self._requests += 1
        for name, found in drifts.items():
            output = self._outputs[name]
            for row in found.rows:
                metrics.drift(name, row, weight, scalar=found.scalar)
            if outside:
                self._add_apart(output, found, weight, sample.client)
            else:
                self._add(output, found, weight, sample.client, metrics)
        self._samples += sample.rows
        self._verdict = self._new_verdict()
        metrics.judged(self._verdict.state, self._verdict.cause)
        return {} if outside else {name: found.rows for name, found in drifts.items()}

    def _drift(self, spec: TensorSpec, expected: Mapping[str, Array], sample: Sample, outside: bool) -> OutputDrift:
        reference, candidate = expected[spec.name], sample.outputs[spec.name]
        if outside:
            drift = compare(reference, candidate, spec, self._batch_axis)
        else:
            drift = self._outputs[spec.name].slices.compare(reference, candidate)
        if not drift.rows:
            raise ArtifactError(f"the fp32 reference's output {spec.name!r} has no rows")
        return drift

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
            spec.name: _Output(
                spec,
                LiveSlices(spec, self._batch_axis, self._calibration.scales.get(spec.name)),
                Detector(known[spec.name], len(self._specs)),
                scalar=spec.name in self._calibration.scalars,
            )
            for spec in self._specs
        }
        self._samples = 0

    def _is_outside(self, sample: Sample, metrics: ModelMetrics) -> bool:
        """Return whether any input of any row of the sample is outside its range."""
        found = rows_out_of_range(self._calibration.ranges, sample.feeds, sample.rows, self._batch_axis)
        for name, rows in found.items():
            metrics.out_of_range(name, int(rows.sum()))  # report 0 as well: it shows that the input has a range
        return any(rows.any() for rows in found.values())

    def _add_apart(self, output: _Output, drift: OutputDrift, weight: float, client: str) -> None:
        output.apart.add(drift.rows, weight, client)
        found = self._estimates(output.apart.window(), scalar=drift.scalar)
        output.apart_over_until = self._requests + REQUESTS if any(each.lowest > 1 for each in found) else 0

    def _add(self, output: _Output, drift: OutputDrift, weight: float, client: str, metrics: ModelMetrics) -> None:
        name, detector, rows = output.spec.name, output.detector, drift.rows
        output.newest = self._requests
        output.recent.add(rows, weight, client)
        if not drift.scalar:
            metrics.judged_rows(name, rows, weight)
        drifts = [getattr(row, output.metric) for row in rows]
        change = detector.add(drifts, within_budget=drift.scalar or self._within_budget(rows))
        if change == "risen":  # as many remain as a breach needs to be established, or it would end with the change
            output.recent.keep_newest(max(detector.change_age, output.recent.fewest_to_judge()))
            metrics.changed(name)
        elif change:
            output.recent.keep_newest(detector.recovery_age)
        if change:
            output.slices.restart()
        output.slices.add(drift)
        window = output.recent.window()
        found = corroborated(window, self._budget, self._estimates(window, scalar=drift.scalar))
        worst, bound = output.slices.worst(), self._budget.bound("slice_error")
        if worst is not None and bound is not None:
            found.append(slice_estimate(self._budget.ratio("slice_error", worst.error), window.size))
            metrics.worst_slice(name, worst.axis, worst.index)
        output.judge(window, found)
        for each in found:
            metrics.budget_ratio(name, each.metric, each.ratio, each.low, each.high)
        metrics.recent(name, window.size, detector.score)

    def _estimates(self, window: Window, *, scalar: bool) -> list[Estimate]:
        found = estimates(window, self._budget)
        return [each for each in found if not (scalar and each.metric.partition(".")[0] in OF_VECTORS)]

    def _within_budget(self, rows: list[SampleDrift]) -> bool:
        """Whether the expected drift may be learnt from these rows: all of them are within budget."""
        bound = self._budget.bound("relative_l2")
        highest = math.inf if bound is None else bound
        return all(math.isfinite(row.relative_l2) and row.relative_l2 <= highest for row in rows)

    def _new_verdict(self) -> DriftVerdict:
        # An output that none of the last REQUESTS requests asked for has no recent drift.
        outputs = [each for each in self._outputs.values() if each.newest > self._requests - REQUESTS]
        bounds = [(output, each) for output in outputs for each in output.estimates]
        over = [(output, each) for output, each in bounds if each.metric in output.over]
        undecided = [pair for pair in bounds if not pair[1].within]
        state: State = "over" if over else "unknown" if undecided or not bounds else "within"
        verdict = DriftVerdict(
            model=self._verdict.model,
            version=self._verdict.version,
            state=state,
            cause=self._cause(outputs),
            samples=self._samples,
            changed=any(each.detector.alarm for each in outputs),
            at=self._clock(),
        )
        if not bounds:
            return verdict
        confirmed = [pair for pair in bounds if pair[1].confirmable]
        output, nearest = max(over or undecided or confirmed or bounds, key=lambda pair: pair[1].ratio)
        return replace(
            verdict,
            output=output.spec.name,
            metric=nearest.metric,
            ratio=nearest.ratio,
            low=nearest.low,
            high=nearest.high,
            effective_samples=output.effective,
        )

    def _cause(self, recent: Sequence[_Output]) -> Cause:
        cause = worst_cause([each.cause for each in recent])
        if cause == "none" and any(self._requests < each.apart_over_until for each in self._outputs.values()):
            return "out_of_range"
        return cause


def all_finite(output: Array) -> bool:
    """Return whether no element is infinite or NaN; strings and integers are always finite."""
    if not has_slices(output):
        return True
    with np.errstate(invalid="ignore"):  # casting a NaN of a narrow type raises the flag
        return bool(np.isfinite(output.astype(np.float64, copy=False)).all())


def rows_out_of_range(
    ranges: Mapping[str, InputRange], feeds: Mapping[str, Array], rows: int, batch_axis: int | None
) -> dict[str, NDArray[np.bool_]]:
    """Return, for each input that has a range, a mask [rows] of the rows that hold a value outside it."""

    def mask(array: Array, known: InputRange) -> NDArray[np.bool_]:
        out = known.outside(array)
        if batch_axis is None or batch_axis >= array.ndim or array.shape[batch_axis] != rows:
            return np.full(rows, bool(out.any()))
        return np.asarray(out.any(axis=tuple(i for i in range(array.ndim) if i != batch_axis)))

    return {name: mask(feeds[name], known) for name, known in ranges.items() if name in feeds}
