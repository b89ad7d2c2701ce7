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
from typing import NamedTuple, Protocol

from bf16kit.drift.metrics import OF_VECTORS, Budget, OutputDrift, SampleDrift, compare
from bf16kit.messages.errors import ArtifactError
from bf16kit.numerics.tensors import TensorSpec
from service.contract import Array
from service.drift.calibration import Calibration, all_finite, rows_out_of_range
from service.drift.detector import LEARNING_ROWS, Detector, Expected
from service.drift.diagnosis import diagnose, worst_cause
from service.drift.estimates import Estimate, corroborated, estimates, slice_estimate
from service.drift.recent import REQUESTS, LiveSlices, RecentRows, Window
from service.drift.sampler import Sample
from service.drift.verdict import Cause, DriftVerdict, State

_log = logging.getLogger(__name__)
Drifts = Mapping[str, Sequence[SampleDrift]]  # of each row, by output


class DriftObserver(Protocol):
    """Receives the drift of every sample (row) of every output, and the summary of recent samples."""

    def drift(self, output: str, sample: SampleDrift, weight: float, *, scalar: bool = False) -> None:
        """One row's drift, which stands for ``weight`` answered rows. ``scalar``: the row is one number."""

    def judged_rows(self, output: str, rows: Sequence[SampleDrift], weight: float) -> None:
        """All rows of one request, if its drift counts in the verdict; each stands for ``weight`` answered rows."""

    def budget_ratio(self, output: str, metric: str, ratio: float, low: float, high: float) -> None:
        """Recent drift ÷ budget of one bound, and its 95 % interval."""

    def worst_slice(self, output: str, axis: int, index: int) -> None:
        """The axis and the index of the slice with the largest error, if slices have a bound."""

    def recent(self, output: str, effective_samples: float, change_score: float | None) -> None:
        """The effective sample size of recent drift, and the detector's sum ÷ threshold (None: not calibrated yet)."""

    def changed(self, output: str) -> None:
        """The change detector has given the alarm."""

    def out_of_range(self, name: str, rows: int) -> None:
        """``rows`` measured rows of an input lie outside its calibrated range.

        Called with 0 too, for an input with a range.
        """

    def reference_nonfinite(self, rows: int) -> None:
        """``rows`` are left out of all drift, because an output of the reference is not finite for their request."""

    def judged(self, state: str, cause: str) -> None:
        """The state of recent drift and the diagnosed cause; see :class:`service.drift.verdict.DriftVerdict`."""


class _OutputVerdict(NamedTuple):
    """The verdict on one output after its newest sample. ``over``: the bounds that it breaks."""

    estimates: list[Estimate]
    over: frozenset[str]
    cause: Cause
    effective: float


_UNKNOWN = _OutputVerdict([], frozenset(), "none", 0.0)


class _Output:
    """Recent drift of one output, and its detector."""

    def __init__(
        self, spec: TensorSpec, slices: LiveSlices, expected: Expected | None, outputs: int, *, scalar: bool
    ) -> None:
        """``scalar``: it is one number per row, whose relative error depends on how near 0 the requests make it."""
        self.spec = spec
        self.metric = "max_abs" if scalar else "relative_l2"  # whose rise the detector looks for
        self.slices = slices
        self.recent = RecentRows()
        self.apart: RecentRows | None = None  # of requests with inputs outside the calibrated range
        self.apart_over_until = 0  # number of the last request up to which a breach of those counts as recent
        self.detector = Detector(expected, outputs)
        self.verdict = _UNKNOWN
        self.newest = 0  # number of the last request that asked for this output

    def restart(self) -> None:
        self.recent = RecentRows()
        self.apart, self.apart_over_until = None, 0
        self.slices.restart()
        self.detector.restart()
        self.verdict = _UNKNOWN

    def update_verdict(self, window: Window, found: list[Estimate]) -> None:
        """Judge ``found``. A breach begins with the wide interval above the budget, and ends with 1 in the narrow one.

        So chance seldom begins it, and it does not come and go while drift stays near the budget.
        """
        over = frozenset(
            each.metric for each in found if each.lowest > 1 or (each.low > 1 and each.metric in self.verdict.over)
        )
        unhealthy = self.detector.alarm or over
        cause = diagnose(window, self.detector.expected, self.metric) if unhealthy else "none"
        self.verdict = _OutputVerdict(found, over, cause, window.size)


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
        self._profile: str | None = None
        self._outputs: dict[str, _Output] = {}
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

    def observe(self, expected: Mapping[str, Array], sample: Sample, observer: DriftObserver) -> Drifts | None:
        """Compare one request's outputs with the reference's. Outputs that the request did not ask for are skipped.

        Returns each output's drift, nothing of a request that is judged apart, and None if they cannot be compared
        because an output of the reference is not finite. Raises ArtifactError if a reference output has no rows; then
        none of the request's outputs count.
        """
        if self._profile != sample.profile:
            self._start_profile(sample.profile)
        outside = self._is_outside(sample, observer)
        requested = [spec for spec in self._specs if spec.name in sample.outputs]
        if not all(all_finite(expected[s.name]) for s in requested if s.name not in self._calibration.infinite):
            observer.reference_nonfinite(sample.rows)
            return None
        drifts = {spec.name: self._drift(spec, expected, sample, outside) for spec in requested}
        weight = 1.0 / sample.probability
        self._requests += 1
        for name, found in drifts.items():
            output = self._outputs[name]
            for row in found.rows:
                observer.drift(name, row, weight, scalar=found.scalar)
            if outside:
                self._add_apart(output, found, weight, sample.client)
            else:
                self._add(output, found, weight, sample.client, observer)
        self._samples += sample.rows
        self._verdict = self._new_verdict()
        observer.judged(self._verdict.state, self._verdict.cause)
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
        scalars, number = self._calibration.scalars, len(self._specs)
        self._outputs = {
            spec.name: _Output(spec, self._new_slices(spec), known[spec.name], number, scalar=spec.name in scalars)
            for spec in self._specs
        }
        self._samples = 0

    def _new_slices(self, spec: TensorSpec) -> LiveSlices:
        return LiveSlices(spec, self._batch_axis, self._calibration.scales.get(spec.name))

    def _is_outside(self, sample: Sample, observer: DriftObserver) -> bool:
        """Return whether any input of any row of the sample is outside its range."""
        found = rows_out_of_range(self._calibration.ranges, sample.feeds, sample.rows, self._batch_axis)
        for name, rows in found.items():
            observer.out_of_range(name, int(rows.sum()))  # report 0 as well: it shows that the input has a range
        return any(rows.any() for rows in found.values())

    def _add_apart(self, output: _Output, drift: OutputDrift, weight: float, client: str) -> None:
        if output.apart is None:
            output.apart = RecentRows()
        output.apart.add(drift.rows, weight, client)
        found = self._estimates(output.apart.window(), scalar=drift.scalar)
        output.apart_over_until = self._requests + REQUESTS if any(each.lowest > 1 for each in found) else 0

    def _add(self, output: _Output, drift: OutputDrift, weight: float, client: str, observer: DriftObserver) -> None:
        name, detector, rows = output.spec.name, output.detector, drift.rows
        output.newest = self._requests
        output.recent.add(rows, weight, client)
        if not drift.scalar:
            observer.judged_rows(name, rows, weight)
        drifts = [getattr(row, output.metric) for row in rows]
        change = detector.add(drifts, within_budget=drift.scalar or self._within_budget(rows))
        if change == "risen":  # as many remain as a breach needs to be established, or it would end with the change
            output.recent.keep_newest(max(detector.change_age, output.recent.fewest_to_judge()))
            observer.changed(name)
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
            observer.worst_slice(name, worst.axis, worst.index)
        output.update_verdict(window, found)
        for each in found:
            observer.budget_ratio(name, each.metric, each.ratio, each.low, each.high)
        observer.recent(name, window.size, detector.score)

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
        bounds = [(output, each) for output in outputs for each in output.verdict.estimates]
        over = [(output, each) for output, each in bounds if each.metric in output.verdict.over]
        undecided = [pair for pair in bounds if not pair[1].within]
        state: State = "over" if over else "unknown" if undecided or not bounds else "within"
        confirmed = [pair for pair in bounds if pair[1].confirmable]
        output, nearest = max(
            over or undecided or confirmed or bounds, key=lambda pair: pair[1].ratio, default=(None, None)
        )
        return DriftVerdict(
            model=self._verdict.model,
            version=self._verdict.version,
            state=state,
            cause=self._cause(outputs),
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

    def _cause(self, recent: Sequence[_Output]) -> Cause:
        cause = worst_cause([each.verdict.cause for each in recent])
        if cause == "none" and any(self._requests < each.apart_over_until for each in self._outputs.values()):
            return "out_of_range"
        return cause
