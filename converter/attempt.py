"""One attempt at an artifact: write weights and graphs by a plan, read them back, run them, compare with the source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import RESIDUAL, ExportEntry, Manifest, Plan, PlanEntry, ProfileEntry, SpecEntry
from bf16kit.artifact.manifest import Source as SourceEntry
from bf16kit.artifact.publish import StagingArtifact
from bf16kit.messages.errors import ConversionError, UsageError
from bf16kit.numerics.rounding import Census
from converter.fuse.check import faults
from converter.fuse.fuse import Fusions
from converter.options import Options
from converter.plan import Planned, make_plan, narrowed
from converter.plan.decisions import Islands, Overrides
from converter.plan.profiles import PROFILES
from converter.process import versions
from converter.process.memory import release_memory
from converter.process.progress import Progress
from converter.rewrite import Prepared
from converter.source import Source
from converter.verify import golden
from converter.verify.certify import Certified, certify
from converter.verify.exported import GraphReference
from converter.verify.oracle import OracleRun
from converter.verify.samples import Samples
from converter.write import readback as lossless
from converter.write.agreement import check_graph
from converter.write.export import INDEX, Exported, select, write_export
from converter.write.exportweights import write_as_export
from converter.write.graphs import REFERENCE, graph_file, write_graphs, write_unfused_and_fused
from converter.write.narrowed import Rounding
from converter.write.weights import BF16_FILE, FP32_FILE, StoredWeights, write_total, write_weights

_GRAPHS = map(graph_file, (*PROFILES, REFERENCE))
_GOLDEN = (golden.NAME, *map(golden.file_name, PROFILES))
_FILES = (BF16_FILE, FP32_FILE, RESIDUAL, INDEX, *_GRAPHS, *_GOLDEN)
_EXPORTED = "model*.safetensors"


@dataclass(frozen=True, slots=True)
class Attempt:
    """Everything needed to write an artifact, any number of times.

    ``traced`` are profiles written already. ``dropped`` has a note on each of them that did not run.
    """

    options: Options
    source: Source
    prepared: Prepared
    traced: Mapping[str, ProfileEntry]
    calibration: Samples
    oracle_run: OracleRun
    stage: StagingArtifact
    progress: Progress
    dropped: dict[str, str] = field(default_factory=dict)

    def prove(self, islands: Islands) -> tuple[Certified, Mapping[str, Census]]:
        """Write weights and graphs with these ``islands`` and run them; also return the census of rounding."""
        options, source, prepared, stage, progress = self.options, self.source, self.prepared, self.stage, self.progress
        planned = self._plan(islands)
        for name in (*_FILES, *(path.name for path in stage.path.glob(_EXPORTED))):  # of an earlier attempt
            stage.remove(name)
        stored, exported, planned = _write(options, source, prepared, planned, stage, progress)
        with progress.step("checking the fusions"):
            planned = self._without_faults(planned, stored, islands)
        with progress.step("writing graphs"):
            traced = {name: entry for name, entry in self.traced.items() if name not in self.dropped}
            profiles = {**traced, **_write_graphs(options, prepared, planned, stored, stage)}
        manifest = draft_manifest(options, source, planned.plan, stored, profiles)
        if exported is not None:
            manifest = manifest.amended(exports=_describe_export(options, source, exported, stage))
        _check_lossless(options, source, prepared, stored, stage.draft(manifest), exported, progress)
        reference = None if options.residual else GraphReference(prepared.reference, prepared.matches)
        census = stored.census
        del stored
        release_memory()
        certified = certify(stage, manifest, self.calibration, options, progress, self.oracle_run, reference)
        certified.notes[:0] = [*_undone_notes(planned), *self.dropped.values()]
        self.dropped.update({name: note for name, note in certified.dropped.items() if name in traced})
        return certified, census

    def _plan(self, islands: Islands, fusions: Fusions | None = None) -> Planned:
        """Plan with ``islands``, and with the panels and without the refused nodes of ``fusions``."""
        options = self.options
        planned = make_plan(
            self.prepared,
            keep_fp32=options.keep_fp32,
            bf16=options.bf16,
            islands=islands,
            profiles=(*options.onnx_profiles, *options.optional_profiles),
            panels=None if fusions is None else fusions.panels,
            refused=None if fusions is None else fusions.refused,
        )
        return _without_idle_profiles(planned, options)

    def _without_faults(self, planned: Planned, stored: StoredWeights, islands: Islands) -> Planned:
        """Compare the fusions with what they replace, and return a plan without those that differ.

        The profiles that use the CPU kernel have the same fusions, so one is checked, in the form that does not round
        activations: cpu-bf16's operators differ from cpu's in nothing but that.
        """
        profile = next((PROFILES[name] for name in planned.plan.nodes if PROFILES[name].uses_kernel), None)
        while profile is not None and planned.fusions.made:
            made = planned.fusions.made
            try:
                paths = write_unfused_and_fused(self.prepared, planned, stored, profile, self.stage.path)
            except ConversionError as error:
                found = {fusion.anchor: f"the graph cannot be written: {error}" for fusion in made}
            else:
                found = faults(*paths, made, self.source.inputs, self.calibration.feeds)
                for path in paths:
                    path.unlink()
            if not found:
                break
            refused = replace(planned.fusions, refused={**planned.fusions.refused, **found})
            again = self._plan(islands, refused)
            plan = planned.plan.model_copy(update={"nodes": again.plan.nodes})  # tensors are written already
            planned = Planned(plan, again.fusions)
        return planned


def _undone_notes(planned: Planned) -> list[str]:
    """Return a note on each fusion that was undone."""
    return [
        f"the CPU kernel does not compute what is fused at node {name!r}: {reason}; ONNX Runtime computes these nodes"
        " one by one, which is slower"
        for name, reason in planned.fusions.refused.items()
    ]


def _without_idle_profiles(planned: Planned, options: Options) -> Planned:
    """Return ``planned`` without profiles in which no product rounds its activations: they would equal another one.

    Raises :class:`UsageError` if such a profile was asked for.
    """
    idle = [
        name
        for name, nodes in planned.plan.nodes.items()
        if PROFILES[name].rounds_products and not _has_rounding(nodes)
    ]
    for name in idle:
        if name in options.onnx_profiles:
            raise UsageError(
                f"--profile {name}: no matrix product or convolution of this model has a bf16 weight; leave out"
                f" --profile {name}"
            )
    nodes = {name: entries for name, entries in planned.plan.nodes.items() if name not in idle}
    return replace(planned, plan=planned.plan.model_copy(update={"nodes": nodes}))


def _has_rounding(nodes: Sequence[PlanEntry]) -> bool:
    return any(entry.code == "rounds" for entry in nodes)


def _write(
    options: Options, source: Source, prepared: Prepared, planned: Planned, stage: StagingArtifact, progress: Progress
) -> tuple[StoredWeights, Exported | None, Planned]:
    """Write the weights, and the export if one was asked for; also return the plan as it was carried out."""
    if not options.stores_export:
        stored = _write_weights(options, source, prepared, planned, stage, progress)
        exported = (
            None
            if options.export is None
            else _write_separate_export(options, source, prepared, planned, stage, progress)
        )
        return stored, exported, planned
    checkpoint = source.checkpoint
    with progress.step("writing the export", checkpoint.nbytes) as advance:
        stored, exported, plan = write_as_export(
            prepared,
            planned.plan,
            Overrides.parse(options.keep_fp32, options.bf16),
            checkpoint.tensors,
            checkpoint.shards,
            stage.path,
            stage.writer,
            Rounding(options.subnormals, options.saturate),
            residual=options.residual,
            progress=advance,
        )
    return stored, exported, replace(planned, plan=plan)


def _write_separate_export(
    options: Options, source: Source, prepared: Prepared, planned: Planned, stage: StagingArtifact, progress: Progress
) -> Exported:
    """Write the export as a separate copy, because the profiles' own weights are stored in panels."""
    checkpoint = source.checkpoint
    overrides = Overrides.parse(options.keep_fp32, options.bf16)
    selection = select(checkpoint.tensors, prepared, narrowed(planned.plan.tensors), overrides)
    rounding = Rounding(options.subnormals, options.saturate)
    with progress.step("writing the export", checkpoint.nbytes) as advance:
        return write_export(checkpoint.tensors, checkpoint.shards, selection, stage.path, rounding, progress=advance)


def _describe_export(
    options: Options, source: Source, exported: Exported, stage: StagingArtifact
) -> dict[str, ExportEntry]:
    """Write the files that go beside the export, and return the manifest's entry for ``exported``."""
    for name, content in source.export_files.items():
        (stage.path / name).write_bytes(content)
    files = [*exported.files, *sorted(source.export_files)]
    return {str(options.export): ExportEntry(files=files, precision="bf16-weights", verified="no")}


def _write_weights(
    options: Options, source: Source, prepared: Prepared, planned: Planned, stage: StagingArtifact, progress: Progress
) -> StoredWeights:
    tensors = source.checkpoint.tensors
    with progress.step("writing weights", write_total(prepared, tensors)) as advance:
        return write_weights(
            prepared,
            planned.plan,
            tensors,
            stage.writer,
            subnormals=options.subnormals,
            saturate=options.saturate,
            residual=options.residual,
            panels=planned.fusions.panels,  # the cpu profile's kernel reads panels; other profiles turn them back
            progress=advance,
        )


def _write_graphs(
    options: Options, prepared: Prepared, planned: Planned, stored: StoredWeights, stage: StagingArtifact
) -> dict[str, ProfileEntry]:
    onnx_profiles, residual = tuple(planned.plan.nodes), options.residual
    files = write_graphs(prepared, planned, stored, stage.path, profiles=onnx_profiles, reference=residual)
    for profile in onnx_profiles:
        check_graph(stage.path / files[profile], planned.plan.nodes[profile])
    return {
        profile: ProfileEntry(format="onnx", graph=name, precision=PROFILES[profile].precision, verified="no")
        for profile, name in files.items()
        if profile in PROFILES
    }


def draft_manifest(
    options: Options, source: Source, plan: Plan, stored: StoredWeights, profiles: Mapping[str, ProfileEntry]
) -> Manifest:
    """Return the manifest with all that is known before anything has run."""
    checkpoint = source.checkpoint
    drawn_by = ["matplotlib"] if options.report else []
    return Manifest(
        model=options.target.model,
        inputs=[SpecEntry.of(spec) for spec in source.inputs],
        outputs=[SpecEntry.of(spec) for spec in source.outputs],
        profiles=dict(profiles),
        reference="reference.onnx" if options.residual and source.graph is not None else None,
        tensors=sorted(stored.tensors.values(), key=lambda entry: entry.name),
        checkpoint=list(stored.checkpoint),
        plan=plan,
        budget=options.budget.as_dict(),
        source=SourceEntry(
            format=checkpoint.format,
            sha256=checkpoint.sha256,
            bytes=checkpoint.nbytes,
            tensors=len(checkpoint.tensors),
        ),
        given=list(source.given),
        tools={**versions.versions([*source.tools, *drawn_by]), **source.foreign_versions},
        seed=options.seed,
        options=options.recorded(),
    )


def _check_lossless(
    options: Options,
    source: Source,
    prepared: Prepared,
    stored: StoredWeights,
    draft: Artifact,
    exported: Exported | None,
    progress: Progress,
) -> None:
    """Read the files of weights back and compare them with the source, bit by bit."""
    tensors = source.checkpoint.tensors
    rounding = lossless.Rounding(options.subnormals, options.saturate)
    with progress.step("comparing with the source", lossless.total(draft, tensors)) as advance:
        lossless.check(draft, prepared, stored, tensors, rounding, advance)
        if exported is not None:
            lossless.check_export(draft.path, exported, tensors, rounding)
