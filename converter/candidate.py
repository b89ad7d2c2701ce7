"""A candidate for the artifact: written by a plan, read back, run, and compared with the source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import RESIDUAL, ExportEntry, Plan, ProfileEntry
from bf16kit.converter.fuse.check import faults
from bf16kit.converter.fuse.fuse import Fusions
from bf16kit.converter.graph.types import untyped
from bf16kit.converter.islands.candidates import SearchResult
from bf16kit.converter.options import Options
from bf16kit.converter.plan import Planned, make_plan, narrowed
from bf16kit.converter.plan.decisions import Islands, Overrides
from bf16kit.converter.plan.profiles import PROFILES
from bf16kit.converter.process.memory import release_memory
from bf16kit.converter.read_and_trace import Job
from bf16kit.converter.rewrite import Prepared
from bf16kit.converter.verify.certify import Certified, certify
from bf16kit.converter.verify.oracle import OracleReference, check_prepared
from bf16kit.converter.verify.running import GraphReference
from bf16kit.converter.verify.samples import samples_usage
from bf16kit.converter.write import readback
from bf16kit.converter.write.borrowedweights import write_as_export, write_without_graph
from bf16kit.converter.write.export import Exported, select, write_export
from bf16kit.converter.write.graphs import write_graphs, write_unfused_and_fused
from bf16kit.converter.write.readback import check_without_graph
from bf16kit.converter.write.weights import Rounding, StoredWeights, write_total, write_weights
from bf16kit.messages.errors import ConversionError, UsageError
from bf16kit.numerics.rounding import Census

_IDLE = (
    "no product would round what it reads: each is kept in fp32, or is not the CPU kernel's (it leaves fp32 weights to"
    " ONNX Runtime, and narrow products, small convolutions, and small LSTM and GRU)"
)


@dataclass(slots=True)
class Verified:
    """What running a written artifact has shown, the census of rounding, fusions, and searches for islands.

    ``sentences`` tell the user about the islands; ``remarks`` are those of them that the measurements do not hold.
    """

    certified: Certified
    census: Mapping[str, Census]
    fusions: Fusions = field(default_factory=Fusions)
    searches: Mapping[str, SearchResult] = field(default_factory=dict)
    sentences: Sequence[str] = ()
    remarks: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Candidate:
    """Writes the artifact of ``job`` from its ``prepared`` graph, any number of times.

    Without ``convolutions``, cpu-bf16 leaves those of images to ONNX Runtime, in fp32 as in cpu.
    """

    job: Job
    prepared: Prepared
    convolutions: bool = True

    def check_prepared_graph(self) -> None:
        """Run the graph that the profiles start from; for cuda, it has been through the other profiles' passes too.

        Also notes what is unknown about the graph, and what that costs.
        """
        job, prepared, profiles = self.job, self.prepared, self.job.options.onnx_profiles
        nodes, all_nodes = untyped(prepared.base), sum(1 for _ in prepared.base.graph.all_nodes())
        if nodes:
            job.notes.append(
                f"the output types of {len(nodes)} of {all_nodes} nodes could not be inferred, the first"
                f" {nodes[0].name!r} ({nodes[0].op_type}); these nodes, and those that read their outputs, stay in fp32"
            )
        if profiles:
            base = PROFILES["cuda" if "cuda" in profiles else profiles[0]].base(prepared)
            with job.progress.step("checking the prepared graph"):
                check_prepared(job.source_run, prepared, base, job.source, job.samples.feeds, job.stage.path)
                release_memory()

    def write_and_verify(self, islands: Islands) -> Verified:
        """Write weights and graphs with these ``islands``, read them back, and run them."""
        job, stage, prepared = self.job, self.job.stage, self.prepared
        planned = plan_profiles(prepared, job.options, islands, convolutions=self.convolutions)
        for path in list(stage.path.glob("[!.]*")):  # of an earlier candidate; scratch files are hidden
            if path.name not in [profile.graph for profile in job.traced.values()]:
                stage.remove(path.name)
        stored, exported, planned = self._write_weights(planned)
        with job.progress.step("checking the fusions"):
            planned = self._without_faults(planned, stored, islands)
        with job.progress.step("writing graphs"):
            profiles = {**job.traced, **self._write_graphs(planned, stored)}
        manifest = job.draft_manifest(planned.plan, stored, profiles)
        if exported is not None:
            manifest = manifest.amended(exports=self._describe_export(exported))
        self._read_back(stored, stage.draft(manifest), exported)
        census = stored.census
        del stored
        release_memory()
        reference = None if job.options.residual else GraphReference(prepared.reference, prepared.matches)
        certified = certify(stage, manifest, job.samples, job.options, job.progress, job.source_run, reference)
        certified.notes[:0] = [
            f"the CPU kernel does not compute what is fused at node {name!r}: {reason}; ONNX Runtime computes these"
            " nodes one by one, which is slower"
            for name, reason in planned.fusions.refused.items()
        ]
        certified.notes += [
            f"no profile {name}: it would equal cpu, because {_IDLE}"
            for name in job.options.optional_profiles
            if name not in planned.plan.nodes and self.convolutions
        ]
        return Verified(certified, census, planned.fusions)

    def with_fp32_convolutions(self, verified: Verified, islands: Islands) -> Verified:
        """Write again without convolutions in bf16 if cpu-bf16 is over budget with them, unlike cpu.

        They round far more than products. A model that was within budget with products alone must not lose cpu-bf16.
        """
        breaches, kinds = verified.certified.breaches, {fusion.kind for fusion in verified.fusions.made}
        over, asked = breaches.get("cpu-bf16", ()), "cpu-bf16" in self.job.options.onnx_profiles
        alone = not kinds & {"product", "attention", "recurrence"}
        as_asked = asked and (alone or self.job.options.allow_over_budget)
        if not over or breaches.get("cpu") or not verified.fusions.convolve or as_asked:
            return verified
        verified.certified.release()
        again = replace(self, convolutions=False).write_and_verify(islands)
        certified, listed = again.certified, "".join(f"\n  {breach}" for breach in over)
        if "cpu-bf16" not in certified.manifest.profiles:
            certified.notes.append(f"no profile cpu-bf16: its convolutions drift over budget:{listed}")
        elif not certified.breaches["cpu-bf16"]:
            certified.notes.append(f"cpu-bf16 leaves convolutions in fp32, because bf16 is over budget there:{listed}")
        return again

    def _without_faults(self, planned: Planned, stored: StoredWeights, islands: Islands) -> Planned:
        """Compare the fusions with what they replace, and return a plan without those that differ.

        The fusions of cpu are among those of cpu-bf16, so one profile is checked, in the form that does not round
        activations: cpu-bf16's operators differ from cpu's in nothing but that.
        """
        job = self.job
        using = [PROFILES[name] for name in planned.plan.nodes if PROFILES[name].uses_kernel]
        profile = max(using, key=lambda each: each.rounds_products, default=None)
        while profile is not None and planned.fusions.made:
            made = planned.fusions.made
            try:
                paths = write_unfused_and_fused(self.prepared, planned, stored, profile, job.stage.path)
            except ConversionError as error:
                found = {fusion.anchor: f"the graph cannot be written: {error}" for fusion in made}
            else:
                found = faults(*paths, made, job.source.inputs, job.samples.feeds)
                for path in paths:
                    path.unlink()
            if not found:
                break
            refused = replace(planned.fusions, refused={**planned.fusions.refused, **found})
            again = plan_profiles(self.prepared, job.options, islands, refused, convolutions=self.convolutions)
            plan = planned.plan.model_copy(update={"nodes": again.plan.nodes})  # tensors are written already
            planned = Planned(plan, again.fusions)
        return planned

    def _write_weights(self, planned: Planned) -> tuple[StoredWeights, Exported | None, Planned]:
        """Write the weights, and the export if one was asked for; also return the plan as it was carried out.

        The export's files hold the artifact's weights if no ONNX graph needs them in another layout. Otherwise the
        export is a separate copy.
        """
        job, options, prepared, checkpoint = self.job, self.job.options, self.prepared, self.job.source.checkpoint
        overrides = Overrides.parse(options.keep_fp32, options.bf16)
        rounding = Rounding(options.subnormals, options.saturate)
        if options.stores_export:
            with job.progress.step("writing the export", checkpoint.nbytes) as advance:
                stored, exported, plan = write_as_export(
                    prepared,
                    planned.plan,
                    overrides,
                    checkpoint.tensors,
                    checkpoint.shards,
                    job.stage.path,
                    job.stage.writer,
                    rounding,
                    residual=options.residual,
                    progress=advance,
                )
            return stored, exported, replace(planned, plan=plan)
        with job.progress.step("writing weights", write_total(prepared, checkpoint.tensors)) as advance:
            stored = write_weights(
                prepared,
                planned.plan,
                checkpoint.tensors,
                job.stage.writer,
                rounding,
                residual=options.residual,
                panels=planned.fusions.panels,  # the cpu profile's kernel reads panels; other profiles turn them back
                progress=advance,
            )
        if options.export is None:
            return stored, None, planned
        selection = select(checkpoint.tensors, prepared, narrowed(planned.plan.tensors), overrides)
        with job.progress.step("writing the export", checkpoint.nbytes) as advance:
            exported = write_export(
                checkpoint.tensors, checkpoint.shards, selection, job.stage.path, rounding, progress=advance
            )
        return stored, exported, planned

    def _describe_export(self, exported: Exported) -> dict[str, ExportEntry]:
        """Write the files that go beside the export, and return the manifest's entry for ``exported``."""
        beside = self.job.source.export_files
        for name, content in beside.items():
            (self.job.stage.path / name).write_bytes(content)
        files = [*exported.files, *sorted(beside)]
        return {str(self.job.options.export): ExportEntry(files=files, precision="bf16-weights", verified="no")}

    def _write_graphs(self, planned: Planned, stored: StoredWeights) -> dict[str, ProfileEntry]:
        directory, names, reference = self.job.stage.path, tuple(planned.plan.nodes), self.job.options.residual
        files = write_graphs(self.prepared, planned, stored, directory, profiles=names, reference=reference)
        precisions = {name: PROFILES[name].precision for name in names}
        return {n: ProfileEntry(format="onnx", graph=files[n], precision=precisions[n], verified="no") for n in names}

    def _read_back(self, stored: StoredWeights, draft: Artifact, exported: Exported | None) -> None:
        """Read the files of weights back and compare them with the source, bit by bit."""
        options, tensors = self.job.options, self.job.source.checkpoint.tensors
        rounding = Rounding(options.subnormals, options.saturate)
        with self.job.progress.step("comparing with the source", readback.total(draft, tensors)) as advance:
            readback.check(draft, self.prepared, stored, tensors, rounding, advance)
            if exported is not None:
                readback.check_export(draft.path, exported, tensors, rounding)


def plan_profiles(
    prepared: Prepared,
    options: Options,
    islands: Islands | None = None,
    fusions: Fusions | None = None,
    *,
    convolutions: bool = True,
) -> Planned:
    """Plan the profiles of ``options`` with ``islands``, the panels of ``fusions``, and without its refused nodes.

    Profiles in which no product rounds its activations are left out: they would equal another one. Raises
    :class:`UsageError` if such a profile was asked for.
    """
    planned = make_plan(
        prepared,
        keep_fp32=options.keep_fp32,
        bf16=options.bf16,
        islands=islands,
        profiles=(*options.onnx_profiles, *options.optional_profiles),
        panels=None if fusions is None else fusions.panels,
        refused=None if fusions is None else fusions.refused,
        convolutions=convolutions,
    )
    idle = [
        name
        for name, nodes in planned.plan.nodes.items()
        if PROFILES[name].rounds_products and not any(entry.code == "rounds" for entry in nodes)
    ]
    if asked := [name for name in idle if name in options.onnx_profiles]:
        raise UsageError(f"--profile {asked[0]}: it would equal cpu, because {_IDLE}; leave out --profile {asked[0]}")
    nodes = {name: entries for name, entries in planned.plan.nodes.items() if name not in idle}
    return replace(planned, plan=planned.plan.model_copy(update={"nodes": nodes}))


def write_and_verify_torch(job: Job) -> Verified:
    """Write what restores the weights beside the traced profiles, then run those profiles.

    The weights are those in the first traced file. Raises :class:`ConversionError` if the source has no outputs to
    compare with, or if no profile is left that runs.
    """
    options, source, stage, checkpoint = job.options, job.source, job.stage, job.source.checkpoint
    oracle = source.oracle
    if oracle is None or not job.source_run.outputs:
        raise ConversionError(
            f"{options.source}: {source.no_graph_reason}; and the format that torch runs cannot be checked:"
            f" {job.source_run.how}\nIf these samples do not fit the model, pass others with"
            f" {samples_usage(source.inputs)}"
        )
    written = stage.path / next(iter(job.traced.values())).graph
    with job.progress.step("writing weights", checkpoint.nbytes) as advance, ExitStack() as files:
        residual = files.enter_context(stage.writer(RESIDUAL)) if options.residual else None
        stored = write_without_graph(checkpoint.tensors, written, residual, advance)
    manifest = job.draft_manifest(Plan(), stored, job.traced)
    with job.progress.step("comparing with the source", checkpoint.nbytes) as advance:
        check_without_graph(stage.draft(manifest), checkpoint.tensors, advance)
    release_memory()
    answers = replace(job.source_run, how=f"{job.source_run.how}, which is the reference")
    reference = OracleReference(oracle, source)
    try:
        certified = certify(stage, manifest, job.samples, options, job.progress, answers, reference)
    except ConversionError as error:
        raise ConversionError(f"{options.source}: no ONNX: {source.no_graph_reason}; {error}") from error
    return Verified(certified, stored.census)
