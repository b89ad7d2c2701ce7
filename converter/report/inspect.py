"""Describes an artifact, as text for the user and as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import ProfileEntry
from bf16kit.drift.verdicts import DriftRow, format_budget_ratio
from bf16kit.messages.document import plain
from bf16kit.messages.text import listed, size, table
from bf16kit.numerics.tensors import describe as describe_shape
from converter.report import recovery
from converter.report.figures import Figures, figures

VERSION = 1  # of the format that `inspect --json` writes
_FEW = 3  # files named in a sentence, at most


def describe(path: Path) -> str:
    """Describe the artifact in ``path``, after checking its files: verdict, profiles, inputs, outputs, sizes, plan,
    drift and digests.

    Raises :class:`ArtifactError` or a subclass if it is damaged or no artifact.
    """
    artifact = Artifact.open(path)
    found = _figures(artifact)
    parts = [
        _head(artifact, found),
        _edges(found),
        _profiles(found),
        _exports(found),
        _plan(found),
        _islands(found),
        drift(found),
        _slices(found),
        "" if found.recovery is None else recovery.text(found.recovery),
        _files(found),
    ]
    return "\n\n".join(part for part in parts if part)


def record(path: Path) -> dict[str, Any]:
    """Return the description for programs, see docs/json.md; raises as :func:`describe` does."""
    artifact = Artifact.open(path)
    found = _figures(artifact)
    fields: dict[str, Any] = plain(found)
    for rows in ("samples", "layers", "spans", "measured_tensors", "island_groups", "notes"):
        del fields[rows]  # kept in measurements.json; notes are printed when converting, and kept only in the report
    fields["off_the_line"] = plain({s.profile: s.first_off for s in found.layers if s.first_off is not None})
    fields["diagnoses"] = plain({s.profile: s.diagnosis for s in found.layers if s.diagnosis is not None})
    fields["lossy_tensors"] = plain([s for s in found.spans if s.remark])
    fields |= {"version": VERSION, "path": str(path), "within": found.within, "headline": found.headline}
    fields["sizes"] |= {"ratio": found.sizes.ratio, "ratio_with_residual": found.sizes.ratio_with_residual}
    return fields | {"measurements": artifact.manifest.measurements}


def drift(found: Figures) -> str:
    """Return a table of the drift measured at conversion, beside its budget."""
    if not found.drift:
        return ""
    sources = "; ".join(sorted({f"{v.samples} sample{'s'[: v.samples != 1]} of {v.source}" for v in found.verdicts}))
    return table(f"Drift from the fp32 reference on {sources}", DRIFT, map(drift_cells, found.drift))


DRIFT = ("profile", "output", "metric", "measured", "worst", "budget", "used", "within")


def drift_cells(row: DriftRow) -> tuple[object, ...]:
    """Return one row of the table with the columns :data:`DRIFT`."""
    profile = f"{row.profile}, emulated" if row.emulated else row.profile
    used = None if row.used is None else format_budget_ratio(row.used)
    return profile, row.output, row.metric, row.measured, row.worst, row.bound, used, "yes" if row.within else "NO"


def _slices(found: Figures) -> str:
    """Return a table of the worst slices of each output."""
    if not found.slices:
        return ""
    rows = [
        (
            each.profile,
            each.output,
            each.where,
            each.error,
            None if each.used is None else format_budget_ratio(each.used),
        )
        for each in found.slices
    ]
    return table("Worst slices, by error ÷ own variation", ("profile", "output", "slice", "error", "used"), rows)


def _figures(artifact: Artifact) -> Figures:
    return figures(artifact.manifest, artifact.manifest.files, artifact.measurements())


def _head(artifact: Artifact, found: Figures) -> str:
    tools = ", ".join(f"{name} {version}" for name, version in found.tools.items())
    lines = [
        f"{found.model}, an artifact in {artifact.path}; every digest matches",
        *(f"verdict     {verdict.sentence}" for verdict in found.verdicts),
        f"reference   {found.reference.sentence}",
        f"source      {found.source.format}, {found.source.tensors} tensors, {size(found.sizes.checkpoint)},"
        f" sha256 {found.source.sha256}",
        *(f"{file.option:<11} {file.name}, {size(file.bytes)}, sha256 {file.sha256}" for file in found.given),
        f"size        {size(found.sizes.graphs_and_weights)} = {found.sizes.ratio:.3f} × the checkpoint;"
        f" with the residual {found.sizes.ratio_with_residual:.3f} ×",
        f"layout      {found.layout}",
        f"batching    {'not declared' if found.batch_axis is None else f'axis {found.batch_axis}'}",
        f"made with   {tools}",
        *(f"runs with   {needs(entry)} ({name})" for name, entry in found.profiles.items() if entry.requires),
    ]
    lines += [f"weights     {span.remark} in {span.name}" for span in found.spans if span.remark][:5]
    lines += [f"search      {search.sentence}" for search in found.searches]
    lines += [
        f"layers      {series.profile}: {series.summary}{' ' if series.option else ''}{series.option}"
        for series in found.layers
        if series.summary
    ]
    return "\n".join(lines)


def needs(entry: ProfileEntry) -> str:
    """Describe the lowest versions that run a profile."""
    return ", ".join(f"{name} {version} or later" for name, version in sorted(entry.requires.items()))


def _edges(found: Figures) -> str:
    ranges = found.input_ranges
    rows = [("input", e.name, e.dtype, describe_shape(e.shape), "", str(ranges.get(e.name, ""))) for e in found.inputs]
    rows += [("output", e.name, e.dtype, describe_shape(e.shape), e.kind, "") for e in found.outputs]
    columns = ("", "name", "dtype", "shape", "kind", "calibrated on")
    return table(
        "Inputs and outputs", columns if ranges else columns[:-1], [row[: None if ranges else -1] for row in rows]
    )


def _profiles(found: Figures) -> str:
    rows = [(name, entry.graph, entry.precision, entry.verified, entry.note) for name, entry in found.profiles.items()]
    return table("Profiles", ("name", "graph", "precision", "verified", "note"), rows)


def _exports(found: Figures) -> str:
    """Return a table of the exports, which other programs read."""
    if not found.exports:
        return ""
    rows = [
        (name, abbreviated(entry.files), entry.precision, entry.verified, entry.note)
        for name, entry in found.exports.items()
    ]
    return table("Exports, for other programs", ("name", "files", "precision", "verified", "note"), rows)


def abbreviated(names: Sequence[str]) -> str:
    """Join the first names into words of a sentence, with the number of the others."""
    more = len(names) - _FEW
    return listed(names) if more <= 0 else f"{', '.join(names[:_FEW])} and {more} more"


def _plan(found: Figures) -> str:
    rows = [(group.of, group.precision, group.summary, group.count) for group in found.plan]
    return table("Precision plan", ("of", "precision", "reason", "count"), rows)


def _islands(found: Figures) -> str:
    """Return a table of the fp32 islands: float nodes of bf16 profiles that stay in fp32, and what a search kept."""
    if not found.islands:
        return ""
    worth = any(island.worth is not None for island in found.islands)
    rows = [
        (island.profile, island.name, island.op, island.reason, *((island.worth,) if worth else ()))
        for island in found.islands
    ]
    columns = ("profile", "node", "op", "reason", *(("drift ÷ budget without it",) if worth else ()))
    return table("fp32 islands", columns, rows)


def _files(found: Figures) -> str:
    rows = [(name, size(entry.bytes), entry.sha256) for name, entry in found.files.items()]
    return table("Files", ("name", "size", "sha256"), rows)
