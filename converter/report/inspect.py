"""What an artifact holds, as text for people."""

from __future__ import annotations

from pathlib import Path

from bf16kit.artifact import Artifact
from bf16kit.manifest import Manifest, PlanEntry
from bf16kit.panels import WIDTH
from bf16kit.tensors import describe as describe_shape
from converter.process.progress import size
from converter.report.figures import drift_rows, reasons, sizes
from converter.report.text import table


def describe(path: Path) -> str:
    """Profiles, inputs and outputs, sizes, plan, drift and digests of the artifact in ``path``, its files checked.

    Raises :class:`~bf16kit.errors.ArtifactError` or its kin when it is not an artifact, or damaged.
    """
    artifact = Artifact.open(path)
    manifest = artifact.manifest
    parts = [
        _head(artifact),
        _edges(manifest),
        _profiles(manifest),
        _plan(manifest),
        _islands(manifest),
        drift(manifest),
        _files(manifest),
    ]
    return "\n\n".join(part for part in parts if part)


def drift(manifest: Manifest) -> str:
    """The drift measured at conversion beside its budget."""
    rows = [
        (row.profile, row.output, row.metric, row.measured, row.worst, row.bound, "yes" if row.within else "NO")
        for row in drift_rows(manifest)
    ]
    if not rows:
        return ""
    sources = "; ".join(sorted({f"{entry.samples} samples of {entry.source}" for entry in manifest.drift.values()}))
    emulated = ", ".join(sorted(profile for profile, entry in manifest.drift.items() if entry.emulated))
    title = f"Drift from the fp32 reference on {sources}" + (f"; emulated: {emulated}" if emulated else "")
    columns = ("profile", "output", "metric", "judged", "worst", "budget", "within")
    return table(title, columns, rows)


def _head(artifact: Artifact) -> str:
    manifest = artifact.manifest
    figures = sizes(manifest, manifest.files)
    tools = ", ".join(f"{name} {version}" for name, version in sorted(manifest.tools.items()))
    batch = "not declared" if manifest.batch_axis is None else f"axis {manifest.batch_axis}"
    return "\n".join(
        [
            f"{manifest.model}, an artifact in {artifact.path}; every digest matches",
            f"source      {manifest.source.format}, {manifest.source.tensors} tensors, {size(figures.checkpoint)},"
            f" sha256 {manifest.source.sha256}",
            f"size        {size(figures.graphs_and_weights)} = {figures.ratio:.3f} × the checkpoint;"
            f" with the residual {figures.ratio_with_residual:.3f} ×",
            f"layout      {_layout(manifest)}",
            f"batching    {batch}",
            f"made with   {tools}",
        ]
    )


def _layout(manifest: Manifest) -> str:
    """How the bf16 tensors lie in their file."""
    narrow = [entry for entry in manifest.tensors if entry.dtype == "bfloat16"]
    panels = [entry for entry in narrow if entry.panels is not None]
    if not panels:
        return "C order"
    share = sum(entry.bytes for entry in panels) / sum(entry.bytes for entry in narrow)
    return f"{len(panels)} of {len(narrow)} bf16 tensors, {share:.0%} of their bytes, in panels of {WIDTH} columns"


def _edges(manifest: Manifest) -> str:
    rows = [("input", e.name, e.dtype, describe_shape(e.shape), "") for e in manifest.inputs]
    rows += [("output", e.name, e.dtype, describe_shape(e.shape), e.kind) for e in manifest.outputs]
    return table("Inputs and outputs", ("", "name", "dtype", "shape", "kind"), rows)


def _profiles(manifest: Manifest) -> str:
    rows = [
        (name, entry.graph, entry.precision, entry.verified, entry.note)
        for name, entry in sorted(manifest.profiles.items())
    ]
    return table("Profiles", ("name", "graph", "precision", "verified", "note"), rows)


def _plan(manifest: Manifest) -> str:
    rows = [("tensors", *reason) for reason in reasons(manifest.plan.tensors)]
    for profile, entries in sorted(manifest.plan.nodes.items()):
        rows += [(f"{profile} nodes", *reason) for reason in reasons(entries)]
    return table("Precision plan", ("of", "precision", "reason", "count"), rows)


def _islands(manifest: Manifest) -> str:
    """The nodes of cuda that compute on floats and stay in fp32."""
    rows = [e for e in manifest.plan.nodes.get("cuda", []) if e.precision == "fp32" and not _has_no_floats(e)]
    if not rows:
        return ""
    return table("fp32 islands of cuda", ("node", "op", "reason"), [(e.name, e.op, e.reason) for e in rows])


def _has_no_floats(entry: PlanEntry) -> bool:
    """By its code; artifacts older than schema 3 have none, and say it in the reason."""
    return entry.code == "no_floats" if entry.code else "to narrow" in entry.reason


def _files(manifest: Manifest) -> str:
    rows = [(name, size(entry.bytes), entry.sha256) for name, entry in sorted(manifest.files.items())]
    return table("Files", ("name", "size", "sha256"), rows)
