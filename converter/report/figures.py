"""Computes all figures shown of an artifact in one place; text, JSON, page and plots only display them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bf16kit.artifact.manifest import RESIDUAL, FileEntry, Manifest, OracleEntry
from bf16kit.drift.measurements import Measurements, Ranges
from bf16kit.drift.verdicts import (
    DriftRow,
    SampleSeries,
    Verdict,
    WorstSlice,
    drift_rows,
    sample_series,
    verdicts,
    worst_slices,
)
from bf16kit.messages.wording import listed
from bf16kit.numerics.panels import WIDTH
from bf16kit.numerics.rounding import Census
from converter.report.islands import Island, PlanGroup, SearchSummary, islands, plan_groups, searches
from converter.report.layers import LayerSeries, layer_series

WITHOUT_RESIDUAL = ("weights.bf16", "weights.fp32")
LOWEST, NORMAL, HIGHEST = -133, -126, 128  # exponents: smallest subnormal, smallest normal, overflow


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of the source's tensors, of weights and graphs, and of the residual."""

    checkpoint: int
    graphs_and_weights: int
    residual: int

    @property
    def ratio(self) -> float:
        """Weights and graphs ÷ checkpoint."""
        return self.graphs_and_weights / max(1, self.checkpoint)

    @property
    def ratio_with_residual(self) -> float:
        return (self.graphs_and_weights + self.residual) / max(1, self.checkpoint)


@dataclass(frozen=True, slots=True)
class ReferenceCheck:
    """The distance of the fp32 reference from the source's outputs: the worst relative_l2, and its bound."""

    checked: bool
    relative_l2: float | None
    bound: float | None
    sentence: str


@dataclass(frozen=True, slots=True)
class Span:
    """One tensor: exponents (log2) of its smallest and largest magnitude (None if all are zero), and what bf16 lost."""

    name: str
    low: float | None
    high: float | None
    census: Census
    remark: str


@dataclass(frozen=True, slots=True)
class Figures:
    """All figures shown of an artifact, beside its ``manifest``; ``files`` are those that the manifest will list.

    What measurements tell is empty if the artifact keeps none. ``spans`` are the worst bf16 tensors.
    """

    manifest: Manifest
    files: Mapping[str, FileEntry]
    notes: Sequence[str]
    measured: Measurements
    drift: tuple[DriftRow, ...]
    verdicts: tuple[Verdict, ...]
    sizes: Sizes
    layout: str
    reference: ReferenceCheck
    samples: tuple[SampleSeries, ...]
    slices: tuple[WorstSlice, ...]
    layers: tuple[LayerSeries, ...]
    spans: tuple[Span, ...]
    islands: tuple[Island, ...]
    searches: tuple[SearchSummary, ...]
    plan: tuple[PlanGroup, ...]

    @property
    def within(self) -> bool:
        """Whether every profile is within the budget."""
        return all(verdict.within for verdict in self.verdicts)

    @property
    def headline(self) -> str:
        """The verdict on all profiles, in one sentence."""
        over = [verdict.profile for verdict in self.verdicts if not verdict.within]
        if not self.verdicts:
            return "No drift was measured."
        if over:
            return f"{listed(over)} {'is' if len(over) == 1 else 'are'} over the drift budget."
        names = listed([verdict.profile for verdict in self.verdicts])
        return f"{names} {'keeps' if len(self.verdicts) == 1 else 'keep'} within the drift budget."


def figures(
    manifest: Manifest,
    files: Mapping[str, FileEntry],
    measurements: Measurements | None = None,
    notes: Sequence[str] = (),
) -> Figures:
    """Compute the figures of ``manifest``, whose files are ``files``, and of the measurements if they were kept."""
    measured, rows = measurements or Measurements(), tuple(drift_rows(manifest))
    judged = tuple(verdicts(manifest, rows))
    failing = {verdict.profile for verdict in judged if not verdict.within}
    return Figures(
        manifest=manifest,
        files=dict(sorted(files.items())),
        notes=notes,
        measured=measured,
        drift=rows,
        verdicts=judged,
        sizes=sizes(manifest, files),
        layout=layout(manifest),
        reference=reference(manifest.oracle),
        samples=tuple(sample_series(manifest, measured)),
        slices=tuple(worst_slices(manifest, measured)),
        layers=tuple(layer_series(measured, failing)),
        spans=spans(measured.ranges),
        islands=tuple(islands(manifest, measured)),
        searches=tuple(searches(measured)),
        plan=tuple(plan_groups(manifest.plan)),
    )


def sizes(manifest: Manifest, files: Mapping[str, FileEntry]) -> Sizes:
    """Return the sizes of the ONNX side of an artifact.

    Torch modules, another format of the same model, are not counted. Nor is an export that is a copy; an export that
    holds the artifact's weights is.
    """
    stored = {tensor.file for tensor in manifest.tensors} - {RESIDUAL}
    counted = [name for name in files if name in (*WITHOUT_RESIDUAL, *stored) or name.endswith(".onnx")]
    residual = files[RESIDUAL].bytes if RESIDUAL in files else 0
    return Sizes(manifest.source.bytes, sum(files[name].bytes for name in counted), residual)


def layout(manifest: Manifest) -> str:
    """Describe how the bf16 tensors are stored in their file."""
    narrow = [entry for entry in manifest.tensors if entry.dtype == "bfloat16"]
    panels = [entry for entry in narrow if entry.panels is not None]
    if not panels:
        return "C order"
    share = sum(entry.bytes for entry in panels) / sum(entry.bytes for entry in narrow)
    return f"{len(panels)} of {len(narrow)} bf16 tensors, {share:.0%} of their bytes, in panels of {WIDTH} columns"


def reference(oracle: OracleEntry | None) -> ReferenceCheck:
    """Return the oracle's result for the fp32 reference."""
    if oracle is None:
        return ReferenceCheck(
            False, None, None, "not checked against the source, because the artifact is older than that check"
        )
    worst = max(oracle.outputs.values(), key=lambda figure: figure.relative_l2, default=None)
    if not oracle.checked or worst is None:
        return ReferenceCheck(False, None, None, f"not checked against the source: {oracle.how}")
    count = f"{oracle.feeds} sample{'' if oracle.feeds == 1 else 's'}"
    sentence = f"within {worst.relative_l2:.2g} of {oracle.how} ({count}; fp32 noise explains {worst.bound:.2g})"
    return ReferenceCheck(True, worst.relative_l2, worst.bound, sentence)


def spans(ranges: Ranges) -> tuple[Span, ...]:
    """Return every tensor of ``ranges``, the worst first."""
    ordered = sorted(ranges.tensors.items(), key=lambda item: (item[1].severity, item[0]))
    return tuple(Span(name, _log2(e.min_abs_nonzero), _log2(e.max_abs), e, _remark(e)) for name, e in ordered)


def _log2(magnitude: float) -> float | None:
    return math.log2(magnitude) if magnitude > 0 else None


def _remark(entry: Census) -> str:
    """Describe the values of a tensor that bf16 does not hold exactly; "" if there are none."""
    found = (
        (entry.nan, "NaN"),
        (entry.inf, "infinite"),
        (entry.overflow, "overflow"),
        (entry.flushed_to_zero, "flushed to zero"),
        (entry.subnormal, "subnormal"),
    )
    return ", ".join(f"{count:,} {what}" for count, what in found if count)
