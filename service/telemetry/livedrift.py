"""One model's current drift according to the metrics: its confidence interval, its cause, and the action taken."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

_LOW, _HIGH = "bf16kit_drift_budget_ratio_low", "bf16kit_drift_budget_ratio_high"
_EFFECTIVE, _SCORE = "bf16kit_drift_effective_samples", "bf16kit_drift_change_score"
_CHANGES, _OVER, _CAUSE = "bf16kit_drift_changes_total", "bf16kit_drift_over_budget", "bf16kit_drift_cause"
_OUT_OF_RANGE, _LAST = "bf16kit_drift_out_of_range_total", "bf16kit_drift_last_sample_timestamp_seconds"
_UP, _WITHIN = "bf16kit_drift_reference_up", "bf16kit_drift_within_budget"
_AXIS, _INDEX = "bf16kit_drift_worst_slice_axis", "bf16kit_drift_worst_slice_index"
_PASSED, _AT = "bf16kit_golden_gate_passed", "bf16kit_golden_gate_timestamp_seconds"
_FALLS, _ANSWERS = "bf16kit_fallback_transitions_total", "bf16kit_answers_total"
ACTIVE = "bf16kit_fallback_active"

#: The metrics that this reads, and the labels that tell apart the series of one model.
LABELS: Mapping[str, tuple[str, ...]] = {
    _LOW: ("output", "metric"),
    _HIGH: ("output", "metric"),
    _EFFECTIVE: ("output",),
    _SCORE: ("output",),
    _AXIS: ("output",),
    _INDEX: ("output",),
    _CHANGES: ("output",),
    _OVER: (),
    _WITHIN: (),
    _CAUSE: ("cause",),
    _OUT_OF_RANGE: ("input",),
    _LAST: (),
    _UP: (),
    _PASSED: (),
    _AT: (),
    ACTIVE: (),
    _FALLS: ("to",),
    _ANSWERS: ("precision",),
}
Values = Mapping[str, Mapping[tuple[str, ...], float]]  # by name, then by the labels' values


@dataclass(frozen=True, slots=True)
class LiveDrift:
    """The current drift of one model. Times are Unix seconds. A value that is unknown or unbounded is None."""

    low: Mapping[str, Mapping[str, float | None]]  # 95 % interval of drift ÷ budget, by output and metric
    high: Mapping[str, Mapping[str, float | None]]
    effective_samples: Mapping[str, float]  # by output
    change_score: Mapping[str, float | None]  # by output; 1 is an alarm
    worst_slice: Mapping[str, tuple[int, int]]  # axis and index, by output
    changes: int  # alarms since it was loaded
    over: bool  # over budget beyond chance
    within: bool  # every bound of the budget is met; neither: not known yet
    cause: str  # "" without a breach or change
    out_of_range: Mapping[str, int]  # measured rows, by input
    last_sample: float | None
    reference_up: bool | None  # None: none is configured
    gate_passed: bool | None
    gate_at: float | None
    fallback: bool  # fp32 answers
    fallback_since: float | None  # None: since it was loaded
    fallbacks: int  # since it was loaded
    answers: Mapping[str, int]  # by precision

    @classmethod
    def of(cls, values: Values, fallback_since: float | None = None) -> LiveDrift:
        """Build from one model's ``values`` of the metrics in :data:`LABELS`. Any may be missing."""
        passed, up = _single_value(values, _PASSED), _single_value(values, _UP)
        return cls(
            low=_interval_ends(values, _LOW),
            high=_interval_ends(values, _HIGH),
            effective_samples={name: value for (name,), value in values.get(_EFFECTIVE, {}).items()},
            change_score={name: _finite(value) for (name,), value in values.get(_SCORE, {}).items()},
            worst_slice={
                name: (round(axis), round(values.get(_INDEX, {}).get((name,), 0)))
                for (name,), axis in values.get(_AXIS, {}).items()
            },
            changes=round(sum(values.get(_CHANGES, {}).values())),
            over=_single_value(values, _OVER) == 1,
            within=_single_value(values, _WITHIN) == 1,
            cause=next((cause for (cause,), value in values.get(_CAUSE, {}).items() if value == 1), ""),
            out_of_range={name: round(rows) for (name,), rows in values.get(_OUT_OF_RANGE, {}).items() if rows},
            last_sample=_single_value(values, _LAST),
            reference_up=None if up is None else up == 1,
            gate_passed=None if passed is None else passed == 1,
            gate_at=_single_value(values, _AT),
            fallback=_single_value(values, ACTIVE) == 1,
            fallback_since=fallback_since,
            fallbacks=round(values.get(_FALLS, {}).get(("fp32",), 0)),
            answers={precision: round(count) for (precision,), count in values.get(_ANSWERS, {}).items()},
        )


def _single_value(values: Values, name: str) -> float | None:
    return values.get(name, {}).get(())


def _interval_ends(values: Values, name: str) -> dict[str, dict[str, float | None]]:
    bounds: dict[str, dict[str, float | None]] = {}
    for (output, metric), value in values.get(name, {}).items():
        bounds.setdefault(output, {})[metric] = _finite(value)
    return bounds


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
