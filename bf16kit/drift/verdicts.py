"""Drift compared with its budget, by output and by sample, and the verdict on each profile."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from bf16kit.artifact.manifest import SINCE_SLICES, DriftEntry, Manifest
from bf16kit.drift.budget import METRICS, Budget
from bf16kit.drift.measurements import Measurements
from bf16kit.drift.metrics import DriftSummary


@dataclass(frozen=True, slots=True)
class DriftRow:
    """One bound, or one metric without a bound, of one output in one profile.

    ``metric`` is a metric's name, or a quantile's such as ``relative_l2.p99``. ``judged`` is compared with ``bound``;
    it equals ``measured``, and readers of the JSON know both. ``used`` is drift ÷ budget: over 1 is over budget.
    """

    profile: str
    output: str
    metric: str
    measured: float
    judged: float
    worst: float | None
    bound: float | None
    used: float | None
    within: bool
    emulated: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether one profile is within budget, as a sentence; ``tightest`` is the row that uses most of its bound."""

    profile: str
    within: bool
    emulated: bool
    samples: int
    source: str
    tightest: DriftRow | None
    sentence: str


@dataclass(frozen=True, slots=True)
class SampleSeries:
    """The relative_l2 of ``measured`` samples of one output, or of fewer, evenly spaced, and the ``bounds`` by name."""

    profile: str
    output: str
    emulated: bool
    measured: int
    values: tuple[float, ...]
    bounds: tuple[tuple[str, float], ...]

    def index(self, row: int) -> int:
        """Return the index of the sample in ``row`` of ``values``."""
        return row * self.measured // len(self.values)


@dataclass(frozen=True, slots=True)
class WorstSlice:
    """One of the worst slices of an output; ``used`` is its error ÷ the bound, None if slices have none."""

    profile: str
    output: str
    where: str
    error: float
    used: float | None


def golden_budget(manifest: Manifest, budget: Budget) -> Budget:
    """Return the part of ``budget`` that the golden samples of an artifact are judged by.

    A converter before schema version 7 let the agreement of a few rows pass by its upper confidence limit, so it did
    not choose golden samples that are within the bound.
    """
    return budget.override({"top1_agreement": None}) if manifest.schema_version < SINCE_SLICES else budget


def drift_rows(manifest: Manifest) -> Iterator[DriftRow]:
    """Yield every measured metric and every bounded quantile, in the order of profiles, outputs and metrics."""
    budget = Budget.from_dict(manifest.budget)
    for profile, entry in sorted(manifest.drift.items()):
        for output, metrics in sorted(entry.outputs.items()):
            yield from rows_of(profile, output, DriftSummary(entry.samples, metrics), budget, entry.emulated)


def rows_of(profile: str, output: str, summary: DriftSummary, budget: Budget, emulated: bool) -> Iterator[DriftRow]:
    """Yield the rows of one output, in the order of the metrics."""
    over = {breach.metric for breach in budget.breaches(output, summary)}
    names = {*METRICS, *budget.as_dict()}
    for name in sorted(names, key=lambda name: (METRICS.index(name.partition(".")[0]), name)):
        judged = summary.judged(name)
        if judged is None:
            continue
        bound = budget.bound(name)
        used = None if bound is None else budget.ratio(name, judged)
        worst = summary.stats.get(name, {}).get("worst")
        yield DriftRow(profile, output, name, judged, judged, worst, bound, used, name not in over, emulated)


def verdicts(manifest: Manifest, rows: Sequence[DriftRow]) -> Iterator[Verdict]:
    """Yield the verdict on each measured profile."""
    for profile, entry in sorted(manifest.drift.items()):
        own = [row for row in rows if row.profile == profile]
        within, tightest = all(row.within for row in own), tightest_of(own)
        how = "emulated on the CPU, on" if entry.emulated else "measured on"
        count = f"{entry.samples} sample{'' if entry.samples == 1 else 's'}"
        judged = f"{profile} is {'within' if within else 'over'} budget: {_closest(tightest)}"
        sentence = "; ".join([judged, f"{how} {count} of {entry.source}", *_unjudged(manifest, entry)])
        yield Verdict(profile, within, entry.emulated, entry.samples, entry.source, tightest, sentence)


_WHY = "zero, at fp32 noise or in too few samples"


def _unjudged(manifest: Manifest, entry: DriftEntry) -> Iterator[str]:
    """Yield what the verdict does not cover."""
    if manifest.schema_version < SINCE_SLICES:
        yield f"judged by the older measure, without slices (schema version {manifest.schema_version})"
        return
    needed = Budget.from_dict(manifest.budget).rows_to_judge()
    floats = {each.name for each in manifest.outputs if "float" in each.dtype}
    for output, metrics in sorted(entry.outputs.items()):
        slices, top1 = metrics.get("slice_error"), metrics.get("top1_agreement")
        if slices is None and output in floats:
            yield f"not judged: any slice of {output}, {_WHY}"
        if slices and slices["judged"] < slices["slices"]:
            left = slices["slices"] - slices["judged"]
            yield f"not judged: {left:.0f} of {slices['slices']:.0f} slices of {output}, {_WHY}"
        if top1 and top1["rows"] < needed:
            yield f"top1_agreement of {output} was judged on {top1['rows']:.0f} rows, its bound needs {needed}"


def tightest_of(rows: Iterable[DriftRow]) -> DriftRow | None:
    """Return the row that uses most of its bound, rows over budget first; None when nothing is bounded."""
    return max((row for row in rows if row.used is not None), key=lambda r: (not r.within, r.used or 0.0), default=None)


def format_budget_ratio(used: float) -> str:
    """Format drift ÷ budget for users."""
    if not math.isfinite(used):
        return "∞ ×"
    if 0 < used < 0.005:
        return "< 1%"
    if used < 10:
        return f"{used:.0%}"
    return f"{used:.3g} ×" if used < 1000 else f"{used:,.0f} ×"


def sample_series(manifest: Manifest, measured: Measurements) -> Iterator[SampleSeries]:
    """Yield drift by sample, in the order of profiles and outputs."""
    bounds = tuple((name, bound) for name, bound in manifest.budget.items() if name.partition(".")[0] == "relative_l2")
    for profile, entry in sorted(measured.profiles.items()):
        emulated = profile in manifest.drift and manifest.drift[profile].emulated
        for output, columns in sorted(entry.outputs.items()):
            yield SampleSeries(profile, output, emulated, columns.measured, tuple(columns.relative_l2), bounds)


def worst_slices(manifest: Manifest, measured: Measurements) -> Iterator[WorstSlice]:
    """Yield the worst slices of each output, in the order of profiles and outputs, worst first."""
    budget, shapes = Budget.from_dict(manifest.budget), {each.name: each.shape for each in manifest.outputs}
    for profile, entry in sorted(measured.profiles.items()):
        for output, slices in sorted(entry.slices.items()):
            for each in slices:
                name = next(iter(shapes[output][each.axis : each.axis + 1]), None)
                where = f"index {each.index} of axis {each.axis}{f' ({name})' if isinstance(name, str) else ''}"
                used = None if budget.bound("slice_error") is None else budget.ratio("slice_error", each.error)
                yield WorstSlice(profile, output, where, each.error, used)


def _closest(row: DriftRow | None) -> str:
    if row is None or row.used is None or row.bound is None:
        return "nothing is bounded"
    floor = row.metric.partition(".")[0] in ("top1_agreement", "sqnr_db")
    allowed = f"at least {row.bound:.3g} is required" if floor else f"at most {row.bound:.3g} is allowed"
    used = format_budget_ratio(row.used)
    share = f"{used} {'of ' if used.endswith('%') else ''}the budget"
    return f"{row.metric} of {row.output} is {row.measured:.3g}, {allowed} ({share})"
