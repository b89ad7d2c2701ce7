"""Verifying what was written by running it: the reference first, then every profile, one in memory at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bf16kit.artifact import Artifact
from bf16kit.errors import RuntimeFailure
from bf16kit.manifest import DriftEntry, Manifest, ProfileEntry
from bf16kit.publish import StagingArtifact
from bf16kit.runtime import Runtime, RuntimeInfo
from bf16kit.runtime.loading import load_reference
from bf16kit.wording import brief
from converter.formats.traced import TRACED
from converter.graph.requirements import required
from converter.model import Feeds
from converter.options import Options
from converter.process.memory import release
from converter.process.progress import Progress
from converter.proof import golden, measure, oracle
from converter.proof.exported import Reference, open_export
from converter.proof.judging import over, without
from converter.proof.measure import Drifts
from converter.proof.nudge import open_nudged
from converter.proof.oracle import Asked
from converter.proof.running import open_profile, open_source, open_traced
from converter.proof.samples import Samples, how_to_give
from converter.proof.seen import as_seen, edges, with_axis
from converter.proof.spool import Spool

_QUOTED = 160  # characters of ONNX Runtime's reason; the rest of the message is as long again
_BOTH = 8  # samples that modules of torch answer in both arithmetics, this CPU's and the other

_ARITHMETICS = {"bf16": "bf16", "bf16-weights": "fp32, to which a CPU without bf16 instructions widens it"}


@dataclass(slots=True)
class Certified:
    """What running an artifact showed: its manifest with drift and batch axis, how each profile ran, and, in words,
    where each is over budget."""

    manifest: Manifest
    runs: dict[str, Run] = field(default_factory=dict)
    over: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def drifts(self) -> dict[str, Drifts]:
        """The drift of every sample that was run, by profile."""
        return {profile: measure.joined(run.drifts) for profile, run in self.runs.items()}


@dataclass(frozen=True, slots=True)
class Run:
    """How far a profile's answers are from the reference's, one entry per answer, and how it ran.

    Every ``step``-th sample was answered, the first among them. ``note`` is what people should know of it; "" where it
    is what ``info`` says.
    """

    drifts: list[Drifts]
    info: RuntimeInfo
    emulated: bool
    note: str = ""
    step: int = 1

    def by_sample(self) -> dict[int, Drifts]:
        """The drift of each answer by the number of its sample."""
        return {self.step * place: found for place, found in enumerate(self.drifts)}


def certify(
    stage: StagingArtifact,
    manifest: Manifest,
    samples: Samples,
    options: Options,
    progress: Progress,
    asked: Asked,
    source: Reference | None = None,
) -> Certified:
    """Run what is in ``stage`` on ``samples``, certify the reference, write golden samples, and measure drift.

    ``asked`` is what the source itself answered; ``source`` is the reference when the artifact keeps none of its own.
    Raises :class:`RuntimeFailure` when a graph does not load or run, :class:`~bf16kit.errors.ConversionError` when the
    reference is not the source. A module of torch's that was not insisted on is dropped instead.
    """
    with progress.step("running the fp32 reference"):
        draft = stage.draft(manifest)
        ends = edges(manifest)
        reference = (
            load_reference(draft, scratch=stage.path)
            if source is None
            else open_source(source.model, *ends, stage.path)
        )
        expected = _expected(reference, samples, stage)
        axis = measure.batch_axis(reference, reference.inputs, reference.outputs, samples.feeds)
        reference.close()
        release()
        checked = oracle.certify(
            asked,
            samples.feeds,
            expected,
            lambda random: open_nudged(
                draft, None if source is None else source.model, random, asked.roundoff, stage.path
            ),
            stage.path,
        )
        release()
    manifest = manifest.amended(oracle=checked)
    manifest, notes = as_seen(manifest, samples.feeds, expected)
    certified = Certified(with_axis(manifest, axis), notes=[*oracle.remarks(checked), *notes])
    if axis is None:
        certified.notes.append("no batch axis: two samples run together were not seen to give what they give apart")
    for profile in sorted(manifest.profiles):
        with progress.step(f"measuring the drift of {profile}"):
            _certify_profile(certified, stage, profile, samples, expected, options)
        release()
    for export in sorted(manifest.exports):
        with progress.step(f"measuring the drift of the export {export}"):
            _certify_export(certified, stage, export, samples, expected, options, source)
        release()
    _keep_golden(certified, stage, samples.feeds, expected, options)
    expected.close()
    return certified


def _expected(reference: Runtime, samples: Samples, stage: StagingArtifact) -> Spool:
    try:
        return measure.spool(reference, samples, stage.path)
    except RuntimeFailure as error:
        raise RuntimeFailure(
            f"the fp32 reference does not run on {samples.origin}: {brief(error, _QUOTED)}\nIf those are not what the"
            f" model is made for, give others with {how_to_give(reference.inputs)}"
        ) from error


def _certify_profile(
    certified: Certified,
    stage: StagingArtifact,
    profile: str,
    samples: Samples,
    expected: Sequence[Feeds],
    options: Options,
) -> None:
    manifest = certified.manifest
    try:
        run = _run(stage.draft(manifest), profile, samples.feeds, expected)
    except RuntimeFailure as error:
        if profile in options.optional_profiles:
            note = f"no profile {profile}: what was written does not run on the samples: {error}"
        elif profile in TRACED and not options.insists_on(profile):
            note = f"no {TRACED[profile].title}: the traced module does not run on the samples: {error}"
        else:
            raise
        certified.manifest = without(stage, manifest, [profile])
        certified.notes.append(note)
        return
    advice = f"{run.info.note}: {run.info.advice}"
    if run.info.advice and advice not in certified.notes:  # two profiles run without the same kernel
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
    expected: Sequence[Feeds],
    options: Options,
    source: Reference | None,
) -> None:
    """Measure what its files cost; that another program reads them otherwise is not for us to say."""
    manifest = certified.manifest
    run = run_export(stage.draft(manifest), export, samples.feeds, expected, source, stage.path)
    entry = manifest.exports[export].model_copy(update={"verified": "host", "note": run.note})
    certified.manifest = manifest.model_copy(update={"exports": manifest.exports | {export: entry}})
    _record(certified, export, f"export {export}", run, samples, options)


def _record(certified: Certified, name: str, called: str, run: Run, samples: Samples, options: Options) -> None:
    """Keep the drift of what was ``run``, and where it is over the budget."""
    certified.runs[name] = run
    summaries = measure.summarise(run.drifts)
    count = next(iter(summaries.values())).samples
    entry = DriftEntry(samples=count, source=samples.origin, outputs=measure.as_dict(summaries), emulated=run.emulated)
    manifest = certified.manifest
    certified.manifest = manifest.model_copy(update={"drift": manifest.drift | {name: entry}})
    certified.over[name] = [f"{called}, {breach}" for breach in over(options.budget, run.drifts)]


def _run(artifact: Artifact, profile: str, feeds: Sequence[Feeds], expected: Sequence[Feeds]) -> Run:
    if profile in TRACED and (worse := _worse_arithmetic(artifact, profile, feeds, expected)) is not None:
        return worse
    return run_profile(artifact, profile, feeds, expected)


def run_profile(artifact: Artifact, profile: str, feeds: Sequence[Feeds], expected: Sequence[Feeds]) -> Run:
    """Run ``profile`` on ``feeds`` as a server would, or emulated where there is no device for it.

    ``expected`` are the reference's answers to ``feeds``. Each answer is reduced to its drift at once.
    """
    manifest = artifact.manifest
    outputs = edges(manifest)[1]
    runtime, emulated = open_profile(artifact, profile)
    try:
        found = measure.drifts(expected, measure.answers(runtime, feeds), outputs, manifest.batch_axis)
        return Run(found, runtime.info, emulated)
    finally:
        runtime.close()


def run_export(
    artifact: Artifact,
    export: str,
    feeds: Sequence[Feeds],
    expected: Sequence[Feeds],
    source: Reference | None = None,
    scratch: Path | None = None,
) -> Run:
    """Run the reference on ``feeds`` with the tensors of ``export`` in it; ``source`` is it where none is kept."""
    runtime, note = open_export(artifact, export, source, scratch)
    try:
        outputs, axis = edges(artifact.manifest)[1], artifact.manifest.batch_axis
        return Run(measure.drifts(expected, measure.answers(runtime, feeds), outputs, axis), runtime.info, False, note)
    finally:
        runtime.close()


def _worse_arithmetic(
    artifact: Artifact, profile: str, feeds: Sequence[Feeds], expected: Sequence[Feeds]
) -> Run | None:
    """A module of torch's in the worse of bf16 and fp32, to which a CPU without bf16 instructions widens it; None
    where it has nothing in bf16.

    A server may have either. Both run on the same :data:`_BOTH` of ``feeds`` at most, so that what is found does not
    depend on which of them is this CPU's: where bf16 is not, it takes ten times as long.
    """
    outputs, axis = edges(artifact.manifest)[1], artifact.manifest.batch_axis
    step = -(-len(feeds) // _BOTH)
    asked, answers = feeds[::step], expected[::step]
    own = run_profile(artifact, profile, asked, answers)
    if own.info.precision == "fp32":
        return None
    runtime = open_traced(artifact, profile, native_bf16=own.info.precision != "bf16")
    try:
        other = measure.drifts(answers, measure.answers(runtime, asked), outputs, axis)
        found = {own.info.precision: own.drifts, runtime.info.precision: other}
    finally:
        runtime.close()
    worse = max(sorted(found), key=lambda precision: _mean(found[precision]))
    some = f" on {len(asked)} of {len(feeds)} samples" if step > 1 else ""
    note = f"when verified: run in both arithmetics{some}; the drift is that of {_ARITHMETICS[worse]}, the worse"
    return Run(found[worse], own.info, own.emulated, note, step)


def _mean(found: Sequence[Drifts]) -> float:
    """The largest mean relative_l2 of an output."""
    return max(summary.stats["relative_l2"]["mean"] for summary in measure.summarise(found).values())


def how(info: RuntimeInfo) -> str:
    """What was special about a run that was not emulated, for people; "" when nothing was."""
    return f"on the CPU kernel, path {info.kernel}" if info.kernel else info.note


def _verified(stage: StagingArtifact, manifest: Manifest, profile: str, run: Run) -> ProfileEntry:
    entry = manifest.profiles[profile]
    if entry.format == "onnx":
        graphs = [stage.path / name for name in (entry.graph, manifest.reference) if name is not None]
        needed = required(profile, graphs, on_device=not run.emulated)
        entry = entry.model_copy(update={"requires": needed})
    if run.emulated:
        note = "emulated on the CPU, not verified on a device"
        return entry.model_copy(update={"verified": "emulated", "note": note})
    # Not the kernel's path, which is this machine's: the same input gives the same bytes. `verify` tells it.
    seen = "on the CPU kernel" if run.info.kernel else run.info.note
    note = run.note or (f"when verified: {seen}" if seen else "")
    return entry.model_copy(update={"verified": "device" if profile == "cuda" else "host", "note": note})


def _keep_golden(
    certified: Certified, stage: StagingArtifact, feeds: Sequence[Feeds], expected: Sequence[Feeds], options: Options
) -> None:
    """Write the golden samples, and read them back. A profile that is within budget on all samples and not on these is
    over it all the same: a server judges it by these, and would never call it ready.

    An optional profile has no say in which they are, and has others of its own where it needs them.
    """
    manifest, budget = certified.manifest, options.budget
    if any(entry.dtype == "string" for entry in (*manifest.inputs, *manifest.outputs)):
        return  # safetensors has no strings
    answered = {p: run.by_sample() for p, run in certified.runs.items() if not certified.over[p]}
    number = golden.choose(budget, [drifts for p, drifts in answered.items() if p not in options.optional_profiles])
    if number:
        certified.notes.append(
            f"the golden samples, by which a server judges each start, are sample {number}: the first that every"
            " profile answers within budget by itself"
        )
    kept, profiles = {golden.NAME: number}, dict(manifest.profiles)
    for profile, drifts in answered.items():
        chosen = number
        if profile in options.optional_profiles and over(budget, [drifts[number]]):
            chosen = golden.choose(budget, [drifts])
            kept[golden.own(profile)] = chosen
            profiles[profile] = profiles[profile].model_copy(update={"golden": golden.own(profile)})
        breaches = over(budget, [drifts[chosen]])
        called = "export" if profile in manifest.exports else "profile"
        certified.over[profile] = [f"{called} {profile}, {each}, on the golden samples alone" for each in breaches]
    for name, chosen in kept.items():
        golden.write(stage.path / name, feeds[chosen], expected[chosen])
    certified.manifest = manifest.amended(golden=golden.NAME, profiles=profiles)
    draft = stage.draft(certified.manifest)
    for name, chosen in kept.items():
        golden.check(draft, name, feeds[chosen], expected[chosen])
