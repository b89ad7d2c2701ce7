"""Computes all figures shown of an artifact in one place; text, JSON, page and plots only display them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bf16kit.artifact.manifest import (
    RESIDUAL,
    ExportEntry,
    FileEntry,
    GivenEntry,
    Manifest,
    OracleEntry,
    ProfileEntry,
    Source,
    SpecEntry,
)
from bf16kit.artifact.recoveryentries import RecoveryEntry
from bf16kit.drift.inputranges import InputRange
from bf16kit.drift.measurements import Measurements
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
from bf16kit.messages.text import listed
from bf16kit.numerics.panels import WIDTH
from converter.report.exponentranges import Span, spans
from converter.report.islands import (
    Island,
    IslandGroup,
    PlanGroup,
    SearchSummary,
    island_groups,
    islands,
    plan_groups,
    searches,
)
from converter.report.layers import LayerSeries, layer_series

WITHOUT_RESIDUAL = ("weights.bf16", "weights.fp32")


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
class Figures:
    """All figures shown of an artifact.

    ``samples``, ``slices``, ``layers``, ``spans`` and ``input_ranges`` are empty if the artifact keeps no measurements.
    ``spans`` are the worst of ``measured_tensors`` bf16 tensors.
    """

    model: str
    source: Source
    sizes: Sizes
    layout: str
    batch_axis: int | None
    oracle: OracleEntry | None
    reference: ReferenceCheck
    verdicts: tuple[Verdict, ...]
    drift: tuple[DriftRow, ...]
    samples: tuple[SampleSeries, ...]
    slices: tuple[WorstSlice, ...]
    layers: tuple[LayerSeries, ...]
    spans: tuple[Span, ...]
    measured_tensors: int
    islands: tuple[Island, ...]
    island_groups: tuple[IslandGroup, ...]
    searches: tuple[SearchSummary, ...]
    plan: tuple[PlanGroup, ...]
    inputs: tuple[SpecEntry, ...]
    outputs: tuple[SpecEntry, ...]
    input_ranges: Mapping[str, InputRange]
    profiles: Mapping[str, ProfileEntry]
    exports: Mapping[str, ExportEntry]
    budget: Mapping[str, float]
    files: Mapping[str, FileEntry]
    tools: Mapping[str, str]
    seed: int
    notes: tuple[str, ...]
    given: tuple[GivenEntry, ...] = ()
    recovery: RecoveryEntry | None = None

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
    rows = tuple(drift_rows(manifest))
    measured = measurements or Measurements()
    kept = tuple(islands(manifest, measured))
    judged = tuple(verdicts(manifest, rows))
    failing = {verdict.profile for verdict in judged if not verdict.within}
    return Figures(
        model=manifest.model,
        source=manifest.source,
        sizes=sizes(manifest, files),
        layout=layout(manifest),
        batch_axis=manifest.batch_axis,
        oracle=manifest.oracle,
        reference=reference(manifest.oracle),
        verdicts=judged,
        drift=rows,
        samples=tuple(sample_series(manifest, measured)),
        slices=tuple(worst_slices(manifest, measured)),
        layers=tuple(layer_series(measured, failing)),
        spans=spans(measured.ranges),
        measured_tensors=measured.ranges.measured,
        islands=kept,
        island_groups=tuple(island_groups(kept)),
        searches=tuple(searches(measured)),
        plan=tuple(plan_groups(manifest.plan)),
        inputs=tuple(manifest.inputs),
        outputs=tuple(manifest.outputs),
        input_ranges=dict(sorted(measured.inputs.items())),
        profiles=dict(sorted(manifest.profiles.items())),
        exports=dict(sorted(manifest.exports.items())),
        budget=dict(manifest.budget),
        files=dict(sorted(files.items())),
        tools=dict(sorted(manifest.tools.items())),
        seed=manifest.seed,
        notes=tuple(notes),
        given=tuple(manifest.given),
        recovery=measured.recovery,
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
