"""The steps of a conversion, in order: read → rewrite → plan → write → verify → search if over budget → publish."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.entries import RecoveryEntry
from bf16kit.artifact.manifest import Manifest
from bf16kit.artifact.publish import StagingArtifact, staging
from converter.candidate import Candidate, Verified, write_and_verify_torch
from converter.islands.explanation import measure_layers
from converter.islands.search import IslandSearches
from converter.options import Options
from converter.plan.decisions import Islands
from converter.process.memory import frozen_heap, release_memory
from converter.process.progress import Progress, SilentProgress
from converter.process.quiet import prefix_errors
from converter.publishing import build_measurements, publish
from converter.read_and_trace import Job, read, run_source_model, write_traced_formats
from converter.report.page import check_installed
from converter.rewrite import prepare
from converter.source import Source
from converter.verify.judging import check_stated_bounds, judge
from converter.verify.samples import Samples
from converter.write.borrowedweights import unfolded


@dataclass(frozen=True, slots=True)
class Judgement:
    """The caller's judgement of an artifact before it is published, and its manifest, which may have fewer profiles."""

    manifest: Manifest
    recovery: RecoveryEntry
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvidedInputs:
    """Inputs that a calling program provides, in place of those the conversion would find itself.

    ``read`` returns the source. ``samples`` are the samples to measure on (None: as the options say). ``judge``
    examines the written artifact once it is within the budget, and may reject it with the errors of :func:`convert`.
    """

    read: Callable[[Callable[[int], None]], Source] | None = None
    samples: Samples | None = None
    judge: Callable[[StagingArtifact, Manifest, Progress], Judgement] | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """A published artifact, and notes for the user: one sentence each."""

    artifact: Artifact
    notes: tuple[str, ...]


def convert(options: Options, progress: Progress | None = None, provided: ProvidedInputs | None = None) -> Result:
    """Convert ``options.source`` into an artifact at ``options.target``; nothing is published unless all succeeds.

    Raises :class:`UsageError` for bad options or unreadable input, :class:`ConversionError` for a model that cannot be
    converted, :class:`RuntimeFailure` if a written file does not run, and :class:`BudgetExceeded` if drift is over
    budget and the options do not allow that.
    """
    if options.report:
        check_installed()
    progress, provided = progress or SilentProgress(), provided or ProvidedInputs()
    with (
        frozen_heap() as set_aside,
        prefix_errors(options.source),
        staging(options.target.path, force=options.force) as stage,
    ):
        source = read(options, progress, provided.read)
        set_aside(False)
        job = run_source_model(options, source, provided.samples, stage, progress)
        write_traced_formats(job)
        set_aside(True)
        verified = write_and_verify_torch(job) if source.graph is None else _within_budget(job)
        del source
        job.release_source()
        release_memory()
        return _publish(job, verified, provided)


def _within_budget(job: Job) -> Verified:
    """Rewrite the graph, then plan, write and verify until it is within budget or there are no islands left to try."""
    options, source = job.options, job.source
    assert source.graph is not None  # noqa: S101 - the caller's `if`
    with job.progress.step("planning"):
        prepared = prepare(source.graph, source.checkpoint.tensors, orders=source.checkpoint.orders)
        if options.stores_export:
            prepared = unfolded(prepared, source.checkpoint.tensors)
    candidate = Candidate(job, prepared)
    candidate.check_prepared_graph()
    search = IslandSearches(prepared, options, job.progress, job.stage.path)
    verified = candidate.write_and_verify(Islands())
    while (islands := search.next_islands(verified.certified)) is not None:
        verified.certified.release()
        verified = candidate.write_and_verify(islands)
    verified.searches, verified.sentences, verified.remarks = search.results, search.sentences(), search.remarks()
    return verified


def _publish(job: Job, verified: Verified, provided: ProvidedInputs) -> Result:
    """Judge what was measured, locate drift by layer, write the report, and rename the artifact into place."""
    options, stage, certified = job.options, job.stage, verified.certified
    job.notes += [*certified.notes, *_artifact_notes(options, certified.manifest)]
    check_stated_bounds(options.budget, certified.manifest)
    manifest, left_out = judge(certified.breaches, certified.manifest, options, stage)
    job.notes += left_out
    recovery = None
    if provided.judge is not None:
        judged = provided.judge(stage, manifest, job.progress)
        manifest, recovery = judged.manifest, judged.recovery
        job.notes += judged.notes
    layers = measure_layers(
        stage.draft(manifest),
        job.samples.feeds,
        stage.path,
        job.progress,
        job.notes,
        remedies_for=[name for name, found in certified.breaches.items() if found and options.search],
        minutes=options.search_minutes,
        without=options.optional_profiles,  # one profile's layers take a tenth of a conversion: `explain` does these
        rebuilt=certified.reference,
    )
    certified.release()
    measurements = build_measurements(manifest, verified, layers, job.samples.given, recovery)
    # Without `sentences`: the page reads a search's results from the measurements, and shows them beside the islands.
    artifact = publish(options, stage, manifest, measurements, [*job.notes, *verified.remarks], job.progress)
    return Result(artifact, (*job.notes, *verified.sentences))


def _artifact_notes(options: Options, manifest: Manifest) -> Iterator[str]:
    """Yield notes on properties of the artifact that its owner may not expect."""
    if not any(entry.dtype == "bfloat16" for entry in manifest.tensors):
        yield "no weight became bf16, so no memory is saved: all are small, one-dimensional or kept in fp32"
    if not options.residual:
        yield "--no-residual: the rounded weights were checked, but the checkpoint cannot be restored"
