"""The walk of a conversion: source is read → plan → fold → narrow → write graphs → verify by running → measure drift →
rename into place → report."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bf16kit.artifact import Artifact
from bf16kit.errors import ArtifactDamaged, ConversionError
from bf16kit.manifest import MEASUREMENTS, RESIDUAL, SCHEMA_VERSION, Manifest, Plan, ProfileEntry, SpecEntry
from bf16kit.manifest import Source as SourceEntry
from bf16kit.measurements import Layers, Measurements, ProfileMeasurements, ranges, sample_columns
from bf16kit.numerics import Census
from bf16kit.publish import StagingArtifact, staging
from converter import sources
from converter.cpukernel.products import panelled
from converter.formats import lossless
from converter.formats.agreement import check_graph
from converter.formats.onnx import write_graphs
from converter.formats.weights import BF16_FILE, FP32_FILE, StoredWeights, write_total, write_weights
from converter.graph.cuda_support import required, stand_in
from converter.graph.types import untyped
from converter.model import Source
from converter.options import Options
from converter.passes import Prepared, prepare
from converter.plan import make_plan, narrowed
from converter.plan.decisions import Islands
from converter.plan.profiles import PROFILES
from converter.process import versions
from converter.process.memory import release
from converter.process.naming import naming
from converter.process.progress import Progress, Silent
from converter.proof import explain, samples
from converter.proof.certify import Certified, certify
from converter.proof.judging import check_budget, check_judged, judge, with_kinds
from converter.proof.oracle import Asked, ask
from converter.proof.preparation import check_prepared
from converter.proof.random_samples import generate
from converter.proof.samples import Samples
from converter.report import page
from converter.search.mending import Mending
from converter.sources.onnx_file import name_inputs

TORCHSCRIPT_FILE = "model.torchscript.pt"


@dataclass(frozen=True, slots=True)
class Result:
    """A published artifact, and what its maker should know: one sentence each."""

    artifact: Artifact
    notes: tuple[str, ...]


def convert(options: Options, progress: Progress | None = None) -> Result:
    """Convert ``options.source`` into an artifact at ``options.target``; nothing is published unless all succeeds.

    Raises :class:`~bf16kit.errors.UsageError` for bad options or unreadable input,
    :class:`~bf16kit.errors.ConversionError` for a model that cannot be converted,
    :class:`~bf16kit.errors.RuntimeFailure` when what was written does not run, and
    :class:`~bf16kit.errors.BudgetExceeded` when its drift is over budget and that was not allowed.
    """
    progress = progress or Silent()
    notes: list[str] = []
    with naming(options.source), staging(options.target.path, force=options.force) as stage:
        source = _read(options, progress)
        source.outputs = with_kinds(source.outputs, options.outputs)
        notes += check_budget(options.budget, source.outputs)
        notes += source.notes
        calibration = _samples(options, source)
        if not options.samples:
            notes.append(f"drift was measured on {calibration.origin}, for want of --samples")
        asked = _ask(source, calibration, stage, progress)
        profiles = _trace(options, source, stage, progress, notes)
        release()
        with progress.step("planning"):
            prepared = prepare(source.graph, source.checkpoint.tensors)
        notes += _unknown(options, prepared)
        _check_prepared(options, source, prepared, asked, calibration, stage, progress)
        work = _Work(options, source, prepared, profiles, calibration, asked, stage, progress)
        mending = Mending(prepared, options, calibration, progress)
        certified, census = work.prove(Islands())
        while (islands := mending.islands(certified)) is not None:
            certified, census = work.prove(islands)
        del source, prepared, work
        release()
        notes += [*certified.notes, *mending.sentences()]
        if not any(entry.dtype == "bfloat16" for entry in certified.manifest.tensors):
            notes.append("no weight became bf16: all are small, one-dimensional or kept in fp32, so no memory is saved")
        if not options.residual:
            notes.append("--no-residual: the checkpoint cannot be restored; how its weights were rounded was checked")
        check_judged(options.budget, certified.manifest)
        manifest, left_out = judge(certified.over, certified.manifest, options, stage)
        notes += left_out
        layers = explain.tables(stage.draft(manifest), calibration.feeds, stage.path, progress, notes)
        measured = _measured(manifest, certified, layers, census, mending)
        artifact = _publish(options, stage, manifest, measured, notes, progress)
    return Result(artifact, tuple(notes))


@dataclass(frozen=True, slots=True)
class _Work:
    """What writing an artifact needs, as often as it has to be written; ``traced`` are the profiles there already."""

    options: Options
    source: Source
    prepared: Prepared
    traced: Mapping[str, ProfileEntry]
    calibration: Samples
    asked: Asked
    stage: StagingArtifact
    progress: Progress

    def prove(self, islands: Islands) -> tuple[Certified, Mapping[str, Census]]:
        """Write weights and graphs with these ``islands``, and run them; also what rounding the weights met."""
        options, source, prepared, stage, progress = self.options, self.source, self.prepared, self.stage, self.progress
        plan = make_plan(
            prepared,
            keep_fp32=options.keep_fp32,
            bf16=options.bf16,
            islands=islands,
            profiles=_onnx_profiles(options),
        )
        for name in (BF16_FILE, FP32_FILE, RESIDUAL):  # of an earlier attempt
            (stage.path / name).unlink(missing_ok=True)
        stored = _write_weights(options, source, prepared, plan, stage, progress)
        with progress.step("writing graphs"):
            profiles = {**self.traced, **_write_graphs(options, prepared, plan, stored, stage)}
        manifest = _describe(options, source, plan, stored, profiles)
        _check_lossless(options, source, prepared, stored, stage.draft(manifest), progress)
        reference = None if options.residual else prepared.reference
        census = stored.census
        del stored
        release()
        return certify(stage, manifest, self.calibration, options, progress, self.asked, reference), census


def _read(options: Options, progress: Progress) -> Source:
    total = sources.nbytes(options.source)
    with progress.step(f"reading {options.source.name}", total) as advance:
        return sources.read(options, advance)


def _samples(options: Options, source: Source) -> Samples:
    """The samples asked for, or random ones. What they show of the dimensions of an ONNX file is believed from here on,
    unless ``--input`` said what they are."""
    oracle = source.oracle
    runs = None if oracle is None else lambda feeds: deque(oracle.answers(feeds), maxlen=0)
    if options.samples is None:
        return generate(source.inputs, source.graph, source.sampler, options.seed, runs)
    strange = source.checkpoint.format == "onnx" and not options.inputs
    found = samples.load(options.samples, source.inputs, runs if strange else None)
    if found.inputs:
        source.inputs = found.inputs
        name_inputs(source.graph, found.inputs)
    return found


def _ask(source: Source, calibration: Samples, stage: StagingArtifact, progress: Progress) -> Asked:
    """What the source itself answers, before narrowing and folding change it; its oracle is let go of afterwards."""
    with progress.step("asking the source itself"):
        asked = ask(source, calibration.feeds, stage.path)
    source.oracle = None
    return asked


def _unknown(options: Options, prepared: Prepared) -> Iterator[str]:
    """What is not known of the graph or of the device, and what that costs."""
    nodes, all_nodes = untyped(prepared.folded), sum(1 for _ in prepared.folded.graph.all_nodes())
    if nodes:
        yield (
            f"the types of what {len(nodes)} of {all_nodes} nodes give could not"
            f" be inferred, first of {nodes[0].name!r} ({nodes[0].op_type}): they, and what reads them, stay in fp32"
        )
    sentence = stand_in() if "cuda" in _onnx_profiles(options) else None
    if sentence is not None:
        yield sentence


def _check_prepared(
    options: Options,
    source: Source,
    prepared: Prepared,
    asked: Asked,
    calibration: Samples,
    stage: StagingArtifact,
    progress: Progress,
) -> None:
    """Run the graph that the profiles start from; that of cuda has been through the steps of the others, too."""
    profiles = _onnx_profiles(options)
    if profiles:
        base = PROFILES["cuda" if "cuda" in profiles else profiles[0]].base(prepared)
        with progress.step("checking the prepared graph"):
            check_prepared(asked, prepared, base, (source.inputs, source.outputs), calibration.feeds, stage.path)
            release()


def _trace(
    options: Options, source: Source, stage: StagingArtifact, progress: Progress, notes: list[str]
) -> dict[str, ProfileEntry]:
    """Write the TorchScript module, if there is to be one, and let go of the torch module it was traced from."""
    module, source.module = source.module, None
    if not options.wants_torchscript:
        return {}
    try:
        if module is None:
            raise ConversionError(
                f"TorchScript is not written from {source.checkpoint.format}, which torch cannot trace"
            )
        from converter.formats.torchscript import narrow_and_trace

        with progress.step("tracing TorchScript"):
            narrow_and_trace(module, stage.path / TORCHSCRIPT_FILE)
    except ConversionError as error:
        if options.insists_on_torchscript:
            raise
        notes.append(f"no TorchScript: {error}")
        return {}
    if options.keep_fp32 or options.bf16:
        notes.append(
            "--keep-fp32 and --bf16 speak of ONNX nodes; the TorchScript module follows torch.autocast's rules"
        )
    return {"torchscript": ProfileEntry(format="torchscript", graph=TORCHSCRIPT_FILE, precision="bf16", verified="no")}


def _onnx_profiles(options: Options) -> tuple[str, ...]:
    return options.profiles if options.wants_onnx else ()


def _write_weights(
    options: Options, source: Source, prepared: Prepared, plan: Plan, stage: StagingArtifact, progress: Progress
) -> StoredWeights:
    tensors = source.checkpoint.tensors
    with progress.step("writing weights", write_total(prepared, tensors)) as advance:
        return write_weights(
            prepared,
            plan,
            tensors,
            stage.writer,
            subnormals=options.subnormals,
            saturate=options.saturate,
            residual=options.residual,
            panels=_panels(options, prepared, plan),
            progress=advance,
        )


def _panels(options: Options, prepared: Prepared, plan: Plan) -> dict[str, int]:
    """The weights to store as panels: the cpu profile's kernel reads them so, other profiles put them together."""
    return panelled(prepared.folded, narrowed(plan.tensors)) if "cpu" in _onnx_profiles(options) else {}


def _write_graphs(
    options: Options, prepared: Prepared, plan: Plan, stored: StoredWeights, stage: StagingArtifact
) -> dict[str, ProfileEntry]:
    files = write_graphs(
        prepared, plan, stored, stage.path, profiles=_onnx_profiles(options), reference=options.residual
    )
    for profile in _onnx_profiles(options):
        check_graph(stage.path / files[profile], plan.nodes[profile])
    return {
        profile: ProfileEntry(format="onnx", graph=name, precision=PROFILES[profile].precision, verified="no")
        for profile, name in files.items()
        if profile in PROFILES
    }


def _describe(
    options: Options, source: Source, plan: Plan, stored: StoredWeights, profiles: dict[str, ProfileEntry]
) -> Manifest:
    """The manifest as far as it is known before anything ran."""
    checkpoint = source.checkpoint
    return Manifest(
        model=options.target.model,
        inputs=[SpecEntry.of(spec) for spec in source.inputs],
        outputs=[SpecEntry.of(spec) for spec in source.outputs],
        profiles=profiles,
        reference="reference.onnx" if options.residual else None,
        tensors=sorted(stored.tensors.values(), key=lambda entry: entry.name),
        checkpoint=list(stored.checkpoint),
        plan=plan,
        requires=required(profiles),
        budget=options.budget.as_dict(),
        source=SourceEntry(
            format=checkpoint.format,
            sha256=checkpoint.sha256,
            bytes=checkpoint.nbytes,
            tensors=len(checkpoint.tensors),
        ),
        tools=versions.versions(source.tools),
        seed=options.seed,
        options=options.recorded(),
    )


def _check_lossless(
    options: Options,
    source: Source,
    prepared: Prepared,
    stored: StoredWeights,
    draft: Artifact,
    progress: Progress,
) -> None:
    """Read the weights' files back and compare them with the source, bit by bit."""
    tensors = source.checkpoint.tensors
    rounding = lossless.Rounding(options.subnormals, options.saturate)
    with progress.step("comparing with the source", lossless.total(draft, tensors)) as advance:
        lossless.check(draft, prepared, stored, tensors, rounding, advance)


def _measured(
    manifest: Manifest,
    certified: Certified,
    layers: Mapping[str, Layers],
    census: Mapping[str, Census],
    mending: Mending,
) -> Measurements:
    """What ``measurements.json`` keeps of the profiles that are published."""
    columns = sample_columns(certified.drifts)
    searches = {profile: result.entry() for profile, result in mending.results.items()}
    profiles = {
        profile: ProfileMeasurements(outputs=columns[profile], layers=layers.get(profile), search=searches.get(profile))
        for profile in manifest.drift
    }
    return Measurements(profiles=profiles, ranges=ranges(census))


def _check_digests(draft: Artifact) -> None:
    """Hash what lies on the disk: the manifest's digests were made while it was written, or kept since."""
    try:
        draft.verify()
    except ArtifactDamaged as error:
        raise ConversionError(f"what was written is not what the manifest says, nothing published: {error}") from error


def _publish(
    options: Options,
    stage: StagingArtifact,
    manifest: Manifest,
    measurements: Measurements,
    notes: Sequence[str],
    progress: Progress,
) -> Artifact:
    with progress.step("publishing"):
        measurements = measurements.fitted()
        (stage.path / MEASUREMENTS).write_bytes(measurements.dumps())
        manifest = manifest.model_copy(update={"measurements": MEASUREMENTS, "schema_version": SCHEMA_VERSION})
        if options.report:
            files = stage.draft(manifest).manifest.files
            page.write(stage.path / page.NAME, manifest, files, notes, measurements)
        _check_digests(stage.draft(manifest))
        return stage.publish(manifest)
