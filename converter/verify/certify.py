"""Verifies a written artifact by running it: the reference first, then every profile, one in memory at a time.

A few rows and the reference's outputs for them become golden samples: they are stored in the artifact, and a server
runs them before the model is ready.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import numpy as np

from bf16kit.artifact.manifest import DriftEntry, Manifest
from bf16kit.artifact.publish import StagingArtifact
from bf16kit.converter.graph.cuda_kernels import required
from bf16kit.converter.options import Options
from bf16kit.converter.process.memory import release_memory
from bf16kit.converter.process.progress import Advance, Progress
from bf16kit.converter.verify import measure, oracle
from bf16kit.converter.verify.golden import GOLDEN, check_golden, describe, golden_samples, rows_kept, save_golden
from bf16kit.converter.verify.judging import choose_golden, find_breaches, without_profiles
from bf16kit.converter.verify.levels import levels_of, lost_in_samples
from bf16kit.converter.verify.measure import Expected, Place, Run, golden_part, run_as_served, run_export
from bf16kit.converter.verify.observedshapes import batch_axis, with_observed_shapes
from bf16kit.converter.verify.oracle import OracleReference, OracleRun, resolved
from bf16kit.converter.verify.running import GraphReference, open_fp32_graph, signature
from bf16kit.converter.verify.samples import Samples, samples_usage
from bf16kit.converter.write import TRACED
from bf16kit.drift.budget import Budget
from bf16kit.drift.metrics import worst_of
from bf16kit.messages.errors import ConversionError, RuntimeFailure
from bf16kit.messages.wording import brief, quoted
from bf16kit.runtime import Runtime
from bf16kit.runtime.loading import load_reference
from bf16kit.runtime.memory.weights import Weights, rebuilt_weights

_MAX_REASON = 160  # characters of ONNX Runtime's reason; the rest of the message is as long again

_MADE_FOR_SIZES = (
    ". If the source itself runs on all of them, as on the first, its graph was made for some sizes only: declare free"
    " dimensions as the numbers that they are"
)


@dataclass(slots=True)
class Certified:
    """The results of running an artifact: its manifest with drift and batch axis, one :class:`Run` per profile, and a
    sentence for each bound that a profile exceeds.

    ``expected`` is what every profile was compared with; its outputs stay on disk as long as this object. ``reference``
    are the reference's weights, rebuilt in a file until :meth:`release`; None if there is no such file.
    """

    manifest: Manifest
    expected: Expected
    reference: Weights | None = None
    runs: dict[str, Run] = field(default_factory=dict)
    breaches: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    files: ExitStack = field(default_factory=ExitStack)

    def release(self) -> None:
        """Delete the file of the reference's weights."""
        self.reference = None
        self.files.close()


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
    dropped instead.
    """
    certified = _certify_reference(stage, manifest, samples, progress, oracle_run, source)
    levels = levels_of(certified.expected, certified.manifest.batch_axis)
    for name in (*sorted(manifest.profiles), *sorted(manifest.exports)):
        label = f"profile {name}" if name in manifest.profiles else f"export {name}"
        total = None if name in TRACED else len(samples.feeds)  # of those, it depends on the module
        with progress.step(f"measuring the drift of {name}", total, "runs") as advance:
            if name in manifest.profiles:
                run = _run_profile(certified, stage, name, options, advance)
            else:
                known = source if isinstance(source, GraphReference) else None
                run = _run_export(certified, stage, name, known, advance)
        release_memory()
        if run is None:
            continue
        certified.runs[name] = run
        summaries = measure.summarise(run.drifts)
        entry = DriftEntry(
            samples=next(iter(summaries.values())).samples,
            source=samples.described,
            outputs={output: summary.as_dict() for output, summary in summaries.items()},
            emulated=run.emulated,
        )
        certified.manifest = certified.manifest.amended(drift=certified.manifest.drift | {name: entry})
        certified.breaches[name] = [f"{label}, {breach}" for breach in find_breaches(options.budget, run.drifts)]
        certified.notes += [f"{label}: {note}" for note in _hidden(certified, name, levels, options.budget)]
    _write_golden(certified, stage, options)
    return certified


def _certify_reference(
    stage: StagingArtifact,
    manifest: Manifest,
    samples: Samples,
    progress: Progress,
    oracle_run: OracleRun,
    source: GraphReference | OracleReference | None,
) -> Certified:
    """Run the reference on ``samples``, compare it with the source's own outputs, and find the batch axis."""
    with progress.step("running the fp32 reference", len(samples.feeds), "runs", "comparing") as advance:
        draft, files, weights = stage.draft(manifest), ExitStack(), None
        if isinstance(source, OracleReference):
            reference: Runtime = source
        elif source is not None:
            reference = open_fp32_graph(source.model, *signature(manifest), stage.path)
        else:
            graph = draft.file(str(manifest.reference))
            weights = files.enter_context(rebuilt_weights(draft, graph, stage.path))
            reference = load_reference(draft, rebuilt=weights)
            if weights.files:  # they are in memory, for lack of a disk, and the session has a copy
                files.close()
                weights = None
        try:
            answers = measure.spool(reference.run, samples, stage.path, advance)
        except RuntimeFailure as error:
            raise RuntimeFailure(
                f"the fp32 reference does not run on {samples.origin}: {brief(error, _MAX_REASON)}\nIf these samples do"
                f" not fit the model, pass others with {samples_usage(reference.inputs)}"
                f"{_MADE_FOR_SIZES if oracle_run.outputs else ''}"
            ) from error
        rows_interact = isinstance(source, OracleReference) and not source.rowwise
        axis = None if rows_interact else batch_axis(reference, reference.inputs, reference.outputs, samples.feeds)
        reference.close()
        release_memory()
        checked = oracle.certify(oracle_run, answers)
        release_memory()
    manifest, notes = with_observed_shapes(manifest.amended(oracle=checked), samples.feeds, answers, axis)
    outputs = signature(manifest)[1]
    found = measure.variations(answers, outputs, axis)
    judged = {name: each.scales() for name, each in found.items()}
    vanishing = {name: each.scales(tiny=True) for name, each in found.items()}
    vanishing = {name: axes for name, axes in vanishing.items() if any(np.isfinite(each).any() for each in axes)}
    scales, tiny = (resolved(oracle_run, answers, outputs, axis, each) for each in (judged, vanishing))
    rows = (
        None if axis is None else rows_kept(samples.given, answers[: len(samples.given)], scales, manifest.source.bytes)
    )
    expected = Expected(samples.feeds, answers, scales, len(samples.given), rows, tiny)
    certified = Certified(manifest, expected, weights, files=files)
    certified.notes += [*oracle.remarks(checked), *notes]
    if axis is None:
        why = "it was not confirmed that two samples run together give the same outputs as run apart"
        if rows_interact:
            why = "the model branches on values in its inputs, so one sample may change how another is computed"
        alone = "a server runs each request alone, and all rows of a feed count as one sample"
        certified.notes.append(f"no batch axis: {why}; {alone}")
    return certified


def _hidden(
    certified: Certified, name: str, levels: Sequence[Mapping[str, Sequence[float]]], budget: Budget
) -> Iterator[str]:
    """Yield notes on errors that the budget does not see, as large as those of a slice that is over it."""
    most = budget.bound("slice_error")
    if most is None or certified.breaches[name]:
        return
    for output, ratio in lost_in_samples(certified.runs[name].drifts, levels).items():
        if ratio > most:
            yield (
                f"the error of output {quoted(output)} is {ratio:.2g} × what the values of one sample differ by; if"
                " these differences matter, bound the error in the output's units: --budget max_abs=…"
            )
    for output, tiny in certified.expected.tiny.items():
        found = [replace(one[output], scales=tiny) for one in certified.runs[name].drifts]
        for worst in (each for each in worst_of(found) if each.error > most):
            yield (
                f"the error of index {worst.index} of axis {worst.axis} of output {quoted(output)} is"
                f" {worst.error:.2g} × its variation, and not judged, because its values vanish beside 1; if they"
                " matter, return them in another unit or as an output of their own"
            )


def _run_profile(
    certified: Certified, stage: StagingArtifact, profile: str, options: Options, advance: Advance
) -> Run | None:
    """Run ``profile`` and record how it ran; None if it is optional and does not run: then it is left out."""
    manifest = certified.manifest
    try:
        run = run_as_served(stage.draft(manifest), profile, certified.expected, advance)
    except RuntimeFailure as error:
        if profile in options.optional_profiles:
            certified.manifest = without_profiles(stage, manifest, [profile])
            certified.notes.append(f"no profile {profile}: the written graph does not run on the samples: {error}")
            return None
        if profile in TRACED and profile not in options.formats:  # it was written because there is no ONNX graph
            raise ConversionError(f"the {TRACED[profile].title} does not run on the samples: {error}") from error
        raise
    advice = f"{run.info.note}: {run.info.advice}"
    if run.info.advice and advice not in certified.notes:  # two profiles may run without the same kernel
        certified.notes.append(advice)
    entry = manifest.profiles[profile]
    if entry.format == "onnx":
        graphs = [stage.path / name for name in (entry.graph, manifest.reference) if name is not None]
        entry = entry.model_copy(update={"requires": required(profile, graphs, on_device=not run.emulated)})
    # Not the kernel's path, which depends on this machine: the same input must give the same bytes. `verify` prints it.
    seen = "on the CPU kernel" if run.info.kernel else run.info.note
    where, note = ("device" if profile == "cuda" else "host"), run.note or (f"when verified: {seen}" if seen else "")
    if run.emulated:
        where, note = "emulated", "emulated on the CPU, not verified on a device"
    entry = entry.model_copy(update={"verified": where, "note": note})
    certified.manifest = manifest.amended(profiles=manifest.profiles | {profile: entry})
    return run


def _run_export(
    certified: Certified, stage: StagingArtifact, export: str, source: GraphReference | None, advance: Advance
) -> Run:
    """Run the export's files in the reference's arithmetic; other programs may compute otherwise."""
    manifest = certified.manifest
    run = run_export(stage.draft(manifest), export, certified.expected, source, stage.path, advance)
    entry = manifest.exports[export].model_copy(update={"verified": "host", "note": run.note})
    certified.manifest = manifest.amended(exports=manifest.exports | {export: entry})
    return run


def _write_golden(certified: Certified, stage: StagingArtifact, options: Options) -> None:
    """Write the golden samples and read them back.

    A profile over budget on these counts as over budget, even if it is within budget on all samples together. A server
    judges it by these, and would never report it ready. If there are none on which all profiles are within budget, the
    optional ones take no part in the choice.
    """
    manifest, expected, budget = certified.manifest, certified.expected, options.budget
    if any(entry.dtype == "string" for entry in (*manifest.inputs, *manifest.outputs)):
        return  # safetensors has no strings
    found = {profile: run.given() for profile, run in certified.runs.items() if not certified.breaches[profile]}
    required = [drifts for profile, drifts in found.items() if profile not in options.optional_profiles]
    chosen = choose_golden(budget, found.values()) or choose_golden(budget, required) or Place()
    if chosen != Place():
        certified.notes.append(
            f"the golden samples, on which a server checks each start, are {describe(expected, chosen)}: the first on"
            " which every profile of the artifact is within budget"
        )
    for profile, drifts in found.items():
        breaches = find_breaches(budget, [golden_part(drifts, chosen)])
        label = "export" if profile in manifest.exports else "profile"
        certified.breaches[profile] = [f"{label} {profile}, {each}, on the golden samples alone" for each in breaches]
    certified.manifest = manifest.amended(golden=GOLDEN)
    kept = golden_samples(expected, chosen)
    save_golden(stage.path / GOLDEN, *kept, expected.scales)
    check_golden(stage.draft(certified.manifest), *kept)
