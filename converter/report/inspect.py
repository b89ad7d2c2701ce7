"""Describes an artifact, as text for the user and as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.disk import disk_size
from bf16kit.artifact.entries import RecoveredDrift, RecoveryEntry, TrainingEntry
from bf16kit.artifact.manifest import ProfileEntry
from bf16kit.converter.report.figures import Figures
from bf16kit.drift.table import Drift
from bf16kit.drift.verdicts import format_budget_ratio
from bf16kit.messages.wording import first_few, plain, size, table
from bf16kit.numerics.tensors import describe as describe_shape

VERSION = 2  # of the format that `inspect --json` writes
_FROM_MANIFEST = (
    *("model", "source", "given", "oracle", "batch_axis", "inputs", "outputs", "profiles", "exports", "budget"),
    *("tools", "seed", "measurements"),
)
_FROM_FIGURES = (
    *("within", "headline", "verdicts", "drift", "slices", "reference", "layout", "plan", "islands"),
    *("searches", "files", "on_cpu", "top1"),
)
FILES = 3  # named in a sentence or a cell, at most


def describe(path: Path) -> str:
    """Describe the artifact in ``path``, after checking its files: verdict, profiles, sizes, plan, drift and digests.

    Raises :class:`ArtifactError` or a subclass if it is damaged or no artifact.
    """
    artifact = Artifact.open(path)
    found = Figures(artifact.manifest, artifact.manifest.files, artifact.measurements())
    return "\n\n".join(part for part in (_head(artifact, found), *_parts(found)) if part)


def record(path: Path) -> dict[str, Any]:
    """Return the description for programs, see docs/json.md; raises as :func:`describe` does."""
    artifact = Artifact.open(path)
    found = Figures(artifact.manifest, artifact.manifest.files, artifact.measurements())
    kept = {name: getattr(artifact.manifest, name) for name in _FROM_MANIFEST}
    kept |= {name: getattr(found, name) for name in _FROM_FIGURES}
    fields: dict[str, Any] = plain(kept)
    fields |= plain({"recovery": found.measured.recovery, "input_ranges": found.measured.inputs})
    fields["off_the_line"] = plain({s.profile: s.first_off for s in found.layers if s.first_off is not None})
    fields["diagnoses"] = plain({s.profile: s.diagnosis for s in found.layers if s.diagnosis is not None})
    fields["lossy_tensors"] = plain([s for s in found.spans if s.remark])
    disk = disk_size(artifact)
    ratios = {"total": disk.total, "weights_ratio": disk.weights_ratio, "total_ratio": disk.total_ratio}
    fields["sizes"] = plain(disk) | plain(ratios)
    return fields | {"version": VERSION, "path": str(path)}


def _head(artifact: Artifact, found: Figures) -> str:
    manifest, source, disk = found.manifest, found.manifest.source, disk_size(artifact)
    tools = ", ".join(f"{name} {version}" for name, version in sorted(manifest.tools.items()))
    lines = [
        f"{manifest.model}, an artifact in {artifact.path}; every digest matches",
        *(f"verdict     {verdict.sentence}" for verdict in found.verdicts),
        f"reference   {found.reference.sentence}",
        f"source      {source.format}, {source.tensors} tensors, {size(disk.checkpoint)}, sha256 {source.sha256}",
        *(f"{file.option:<11} {file.name}, {size(file.bytes)}, sha256 {file.sha256}" for file in manifest.given),
        f"size        {disk}",
        f"layout      {found.layout}",
        *([f"on a CPU    {found.on_cpu}"] if found.on_cpu is not None else []),
        f"batching    {'not declared' if manifest.batch_axis is None else f'axis {manifest.batch_axis}'}",
        f"made with   {tools}",
    ]
    lines += [
        f"runs with   {needs(each)} ({name})" for name, each in sorted(manifest.profiles.items()) if each.requires
    ]
    lines += [f"weights     {span.remark} in {span.name}" for span in found.spans if span.remark][:5]
    lines += [f"search      {search.sentence}" for search in found.searches]
    lines += [
        f"layers      {each.profile}: {each.summary} {each.option}".rstrip() for each in found.layers if each.summary
    ]
    return "\n".join(lines)


def _parts(found: Figures) -> Iterator[str]:
    """Yield the tables, and what is said of a recovery."""
    manifest, ranges, trained = found.manifest, found.measured.inputs, found.measured.recovery
    edges = [
        ("input", e.name, e.dtype, describe_shape(e.shape), "", ranges.get(e.name, ""), "") for e in manifest.inputs
    ]
    edges += [
        ("output", e.name, e.dtype, describe_shape(e.shape), e.kind, "", found.top1[e.name]) for e in manifest.outputs
    ]
    yield table("Inputs and outputs", ("", "name", "dtype", "shape", "kind", "calibrated on", "top1_agreement"), edges)
    ran = ("precision", "verified", "note")
    profiles = [(n, e.graph, e.precision, e.verified, e.note) for n, e in sorted(manifest.profiles.items())]
    yield table("Profiles", ("name", "graph", *ran), profiles)
    exports = [
        (n, first_few(e.files, FILES), e.precision, e.verified, e.note) for n, e in sorted(manifest.exports.items())
    ]
    if exports:
        yield table("Exports, for other programs", ("name", "files", *ran), exports)
    plan = [(group.of, group.precision, group.summary, group.count) for group in found.plan]
    yield table("Precision plan", ("of", "precision", "reason", "count"), plan)
    if found.islands:
        width = 5 if any(each.worth is not None for each in found.islands) else 4  # the last column is a search's
        columns = ("profile", "node", "op", "reason", "drift ÷ budget without it")
        rows = [(each.profile, each.name, each.op, each.reason, each.worth) for each in found.islands]
        yield table("fp32 islands", columns[:width], [row[:width] for row in rows])
    if found.drift:
        yield str(Drift(found.drift))
    if found.slices:
        slices = [(each.profile, each.output, each.where, each.error, share(each.used)) for each in found.slices]
        yield table("Worst slices, by error ÷ own variation", ("profile", "output", "slice", "error", "used"), slices)
    if trained is not None:
        yield recovery_text(trained)
    files = [(name, size(entry.bytes), entry.sha256) for name, entry in found.files.items()]
    yield table("Files", ("name", "size", "sha256"), files)


def recovery_text(entry: RecoveryEntry) -> str:
    """Return the drift of a recovery, and how the weights were trained."""
    title = f"Drift from the fp32 outputs of the original weights on {entry.samples} batches of {entry.judged_on}"
    return "\n".join([table(title, RECOVERED, map(recovered_cells, entry.drift)), "", *training(entry.training)])


RECOVERED = ("profile", "output", "metric", "bf16 before", "bf16 recovered", "from its own fp32", "budget")


def recovered_cells(row: RecoveredDrift) -> tuple[object, ...]:
    """Return one row of the table with the columns :data:`RECOVERED`."""
    return row.profile, row.output, row.metric, row.before, row.after, row.own, row.bound


def training(entry: TrainingEntry) -> Iterator[str]:
    """Describe how the weights were trained, one sentence each."""
    yield (
        f"{entry.steps} steps on the {entry.device}, {entry.precision} (products in {entry.computed}),"
        f" {entry.weights:,} weights; {entry.loss} loss {entry.loss_first:.3g} at the first step,"
        f" {entry.loss_last:.3g} at the last; loss scaling {entry.scaling}: {entry.skipped} steps skipped,"
        f" scale {entry.scale_first:g} at first, {entry.scale_last:g} at last"
    )
    if entry.kept is not None and entry.loss_before is not None:  # the oldest artifacts have neither
        losses = {look.step: look.loss for look in entry.looks}
        yield (
            f"loss on {entry.yardstick} batches of --data: {entry.loss_before:.3g} before training,"
            f" {losses[0]:.3g} after {entry.biases_corrected} vectors in fp32 were fitted to the rounded weights,"
            f" {losses[entry.kept]:.3g} after step {entry.kept}, whose weights were kept"
        )


def needs(entry: ProfileEntry) -> str:
    """Describe the lowest versions that run a profile."""
    return ", ".join(f"{name} {version} or later" for name, version in sorted(entry.requires.items()))


def share(ratio: float | None) -> str:
    """Return drift ÷ budget for users, a dash for None."""
    return "–" if ratio is None else format_budget_ratio(ratio)
