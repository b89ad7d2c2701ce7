"""Verifies a written artifact by running it: the reference first, then every profile, one in memory at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import DriftEntry, Manifest, ProfileEntry
from bf16kit.artifact.publish import StagingArtifact
from bf16kit.drift.metrics import SampleDrift
from bf16kit.messages.errors import ConversionError, RuntimeFailure
from bf16kit.messages.wording import brief
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import Runtime
from bf16kit.runtime.loading import load_reference
from converter.graph.cuda_kernels import required
from converter.options import Options
from converter.process.memory import release_memory
from converter.process.progress import Progress
from converter.verify import golden, measure, oracle
from converter.verify.judging import find_breaches, without_profiles
from converter.verify.measure import Expected, Run, run_as_served, run_export
from converter.verify.observedshapes import batch_axis, with_batch_axis, with_observed_shapes
from converter.verify.oracle import OracleReference, OracleRun
from converter.verify.resolved import resolved
from converter.verify.running import GraphReference, open_fp32_graph, signature
from converter.verify.samples import Samples, samples_usage
from converter.verify.spool import Spool
from converter.write.traced import TRACED

_MAX_REASON = 160  # characters of ONNX Runtime's reason; the rest of the message is as long again
_AXIS_UNCONFIRMED = (
    "no batch axis: it was not confirmed that two samples run together give the same outputs as run apart"
)
_ROWS_INTERACT = (
    "no batch axis: the model branches on values in its inputs, so one sample may change how another is computed"
)


@dataclass(slots=True)
class Certified:
    """The results of running an artifact: its manifest with drift and batch axis, one :class:`Run` per profile, and a
    sentence for each bound that a profile exceeds.

    ``expected`` is what every profile was compared with; its outputs stay on disk as long as this object.
    """

    manifest: Manifest
    runs: dict[str, Run] = field(default_factory=dict)
    breaches: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    expected: Expected | None = None

    @property
    def drifts(self) -> dict[str, dict[str, list[SampleDrift]]]:
        """The drift of every sample that was run, by profile and output."""
        return {profile: measure.joined(run.drifts) for profile, run in self.runs.items()}


def certify(
    stage: StagingArtifact,
    manifest: Manifest,
    samples: Samples,
    options: Options,
    progress: Progress,
    oracle_run: OracleRun,
    source: GraphReference | OracleReference | None = None,
) -> Certified:
    """Run the files in ``stage`` on ``samples``: certify the reference, write golden samples, and measure drift.

    ``oracle_run`` holds the source's own outputs. ``source`` is the reference if the artifact keeps none: the source's
    graph, or the source itself. Raises :class:`RuntimeFailure` if a graph does not load or run, and
    :class:`ConversionError` if the reference does not match the source. An optional profile that does not run is
    dropped instead; ConversionError if no profile is left.
    """
    with progress.step("running the fp32 reference"):
        draft = stage.draft(manifest)
        reference = _open_reference(draft, *signature(manifest), source, stage.path)
        answers = _expected(reference, samples, stage)
        rows_interact = isinstance(source, OracleReference) and not source.rowwise
        axis = None if rows_interact else batch_axis(reference, reference.inputs, reference.outputs, samples.feeds)
        reference.close()
        release_memory()
        checked = oracle.certify(oracle_run, answers)
        release_memory()
    manifest = manifest.amended(oracle=checked)
    manifest, notes = with_observed_shapes(manifest, samples.feeds, answers)
    certified = Certified(with_batch_axis(manifest, axis), notes=[*oracle.remarks(checked), *notes])
    outputs = signature(certified.manifest)[1]
    scales = resolved(oracle_run, answers, outputs, axis, measure.slice_scales(answers, outputs, axis))
    certified.expected = expected = Expected(samples.feeds, answers, scales, len(samples.given))
    if axis is None:
        certified.notes.append(_ROWS_INTERACT if rows_interact else _AXIS_UNCONFIRMED)
    for profile in sorted(manifest.profiles):
        with progress.step(f"measuring the drift of {profile}"):
            _certify_profile(certified, stage, profile, samples, expected, options)
        release_memory()
    for export in sorted(manifest.exports):
        with progress.step(f"measuring the drift of the export {export}"):
            graph = None if isinstance(source, OracleReference) else source
            _certify_export(certified, stage, export, samples, expected, options, graph)
        release_memory()
    _write_golden(certified, stage, expected, options)
    return certified


def _open_reference(
    draft: Artifact,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    source: GraphReference | OracleReference | None,
    scratch: Path,
) -> Runtime:
    if source is None:
        return load_reference(draft, scratch=scratch)
    if isinstance(source, OracleReference):
        return source.open(inputs, outputs)
    return open_fp32_graph(source.model, inputs, outputs, scratch)


def _expected(reference: Runtime, samples: Samples, stage: StagingArtifact) -> Spool:
    try:
        return measure.spool(reference, samples, stage.path)
    except RuntimeFailure as error:
        raise RuntimeFailure(
            f"the fp32 reference does not run on {samples.origin}: {brief(error, _MAX_REASON)}\nIf these samples do not"
            f" fit the model, pass others with {samples_usage(reference.inputs)}"
        ) from error


def _certify_profile(
    certified: Certified,
    stage: StagingArtifact,
    profile: str,
    samples: Samples,
    expected: Expected,
    options: Options,
) -> None:
    manifest = certified.manifest
    try:
        run = run_as_served(stage.draft(manifest), profile, expected)
    except RuntimeFailure as error:
        if profile in options.optional_profiles:
            note = f"no profile {profile}: the written graph does not run on the samples: {error}"
        elif profile in TRACED and profile not in options.formats:  # it was written because there is no ONNX graph
            raise ConversionError(f"the {TRACED[profile].title} does not run on the samples: {error}") from error
        else:
            raise
        if manifest.profiles.keys() == {profile}:  # its file holds the weights
            raise ConversionError(note) from error
        certified.manifest = without_profiles(stage, manifest, [profile])
        certified.notes.append(note)
        return
    advice = f"{run.info.note}: {run.info.advice}"
    if run.info.advice and advice not in certified.notes:  # two profiles may run without the same kernel
        certified.notes.append(advice)
    certified.manifest = manifest.model_copy(
        update={"profiles": manifest.profiles | {profile: _verified(stage, manifest, profile, run)}}
    )
    _record(certified, profile, f"profile {profile}", run, samples, options)


def _certify_export(
    certified: Certified,
    stage: StagingArtifact,
    export: str,
    samples: Samples,
    expected: Expected,
    options: Options,
    source: GraphReference | None,
) -> None:
    """Measure the drift of the export's files in the reference's arithmetic; other programs may compute otherwise."""
    manifest = certified.manifest
    run = run_export(stage.draft(manifest), export, expected, source, stage.path)
    entry = manifest.exports[export].model_copy(update={"verified": "host", "note": run.note})
    certified.manifest = manifest.model_copy(update={"exports": manifest.exports | {export: entry}})
    _record(certified, export, f"export {export}", run, samples, options)


def _record(certified: Certified, name: str, label: str, run: Run, samples: Samples, options: Options) -> None:
    """Record the drift of ``run``, and where it exceeds the budget."""
    certified.runs[name] = run
    summaries = measure.summarise(run.drifts)
    count = next(iter(summaries.values())).samples
    entry = DriftEntry(
        samples=count, source=samples.described, outputs=measure.as_dict(summaries), emulated=run.emulated
    )
    manifest = certified.manifest
    certified.manifest = manifest.amended(drift=manifest.drift | {name: entry})
    certified.breaches[name] = [f"{label}, {breach}" for breach in find_breaches(options.budget, run.drifts)]


def _verified(stage: StagingArtifact, manifest: Manifest, profile: str, run: Run) -> ProfileEntry:
    entry = manifest.profiles[profile]
    if entry.format == "onnx":
        graphs = [stage.path / name for name in (entry.graph, manifest.reference) if name is not None]
        needed = required(profile, graphs, on_device=not run.emulated)
        entry = entry.model_copy(update={"requires": needed})
    if run.emulated:
        note = "emulated on the CPU, not verified on a device"
        return entry.model_copy(update={"verified": "emulated", "note": note})
    # Not the kernel's path, which depends on this machine: the same input must give the same bytes. `verify` prints it.
    seen = "on the CPU kernel" if run.info.kernel else run.info.note
    note = run.note or (f"when verified: {seen}" if seen else "")
    return entry.model_copy(update={"verified": "device" if profile == "cuda" else "host", "note": note})


def _write_golden(
    certified: Certified,
    stage: StagingArtifact,
    expected: Expected,
    options: Options,
) -> None:
    """Write the golden samples and read them back.

    A profile over budget on these counts as over budget, even if it is within budget on all samples together. A server
    judges it by these, and would never report it ready. Optional profiles do not take part in the choice; each has
    golden samples of its own where it needs them.
    """
    manifest, budget = certified.manifest, options.budget
    if any(entry.dtype == "string" for entry in (*manifest.inputs, *manifest.outputs)):
        return  # safetensors has no strings
    drifts_by_profile = {p: run.by_sample() for p, run in certified.runs.items() if not certified.breaches[p]}
    number = golden.choose(
        budget, [drifts for p, drifts in drifts_by_profile.items() if p not in options.optional_profiles]
    )
    if number:
        certified.notes.append(
            f"the golden samples, on which a server checks each start, are sample {number}: the first on which every"
            " profile is within budget"
        )
    kept, profiles = {golden.NAME: number}, dict(manifest.profiles)
    for profile, drifts in drifts_by_profile.items():
        chosen = number
        if profile in options.optional_profiles and find_breaches(budget, [drifts[number]]):
            chosen = golden.choose(budget, [drifts])
            kept[golden.file_name(profile)] = chosen
            profiles[profile] = profiles[profile].model_copy(update={"golden": golden.file_name(profile)})
        breaches = find_breaches(budget, [drifts[chosen]])
        label = "export" if profile in manifest.exports else "profile"
        certified.breaches[profile] = [f"{label} {profile}, {each}, on the golden samples alone" for each in breaches]
    for name, chosen in kept.items():
        golden.write(stage.path / name, expected.feeds[chosen], expected.outputs[chosen], expected.scales)
    certified.manifest = manifest.amended(golden=golden.NAME, profiles=profiles)
    draft = stage.draft(certified.manifest)
    for name, chosen in kept.items():
        golden.check(draft, name, expected.feeds[chosen], expected.outputs[chosen])
