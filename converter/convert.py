"""The steps of a conversion, in order: read → rewrite → plan → write → verify → search if over budget → publish."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.entries import RecoveryEntry
from bf16kit.artifact.manifest import MEASUREMENTS, Manifest
from bf16kit.artifact.publish import StagingArtifact, staging
from bf16kit.converter.candidate import Candidate, Verified, write_and_verify_torch
from bf16kit.converter.islands.explanation import measure_layers
from bf16kit.converter.islands.search import IslandSearches
from bf16kit.converter.options import Options
from bf16kit.converter.plan.decisions import Islands
from bf16kit.converter.process.memory import frozen_heap, release_memory
from bf16kit.converter.process.progress import Progress
from bf16kit.converter.process.quiet import prefix_errors
from bf16kit.converter.read_and_trace import Job, branches_named, read, run_source_model, write_traced_formats
from bf16kit.converter.report import page
from bf16kit.converter.rewrite import prepare
from bf16kit.converter.source import Feeds, Source
from bf16kit.converter.verify.judging import check_stated_bounds, judge
from bf16kit.converter.verify.samples import Samples
from bf16kit.converter.write.borrowedweights import unfolded
from bf16kit.drift.measurements import (
    MAX_BYTES,
    MOST_SLICES,
    Layers,
    Measurements,
    ProfileMeasurements,
    SliceEntry,
    input_ranges,
    ranges,
    sample_columns,
)
from bf16kit.drift.metrics import OutputDrift, worst_of
from bf16kit.messages.errors import ConversionError

# Judges a written artifact that is within the budget before it is published. Returns its manifest, which may have fewer
# profiles, the record of a recovery, and notes; may reject the artifact with the errors of :func:`convert`.
Judge = Callable[[StagingArtifact, Manifest, Progress], tuple[Manifest, RecoveryEntry, Sequence[str]]]


@dataclass(frozen=True, slots=True)
class Result:
    """A published artifact, and notes for the user: one sentence each."""

    artifact: Artifact
    notes: tuple[str, ...]


def convert(
    options: Options,
    progress: Progress | None = None,
    *,
    reader: Callable[[Callable[[int], None]], Source] | None = None,
    samples: Samples | None = None,
    judged_by: Judge | None = None,
) -> Result:
    """Convert ``options.source`` into an artifact at ``options.target``; nothing is published unless all succeeds.

    A ``reader`` returns the source, and ``samples`` are measured on, in place of those that the options name.
    ``judged_by`` examines the written artifact last.

    Raises :class:`UsageError` for bad options or unreadable input, :class:`ConversionError` for a model that cannot be
    converted, :class:`RuntimeFailure` if a written file does not run, and :class:`BudgetExceeded` if drift is over
    budget and the options do not allow that.
    """
    if options.report:
        page.check_installed()
    progress = progress or Progress()
    with (
        frozen_heap() as set_aside,
        prefix_errors(options.source),
        staging(options.target.path, force=options.force) as stage,
    ):
        source = read(options, progress, reader)
        set_aside(False)
        job = run_source_model(options, source, samples, stage, progress)
        write_traced_formats(job)
        set_aside(True)
        with branches_named(job):
            verified = write_and_verify_torch(job) if source.graph is None else _within_budget(job)
        del source
        job.release_source()
        release_memory()
        return _judge_and_publish(job, verified, judged_by)


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
    islands = Islands()
    verified = candidate.write_and_verify(islands)
    while (found := search.next_islands(verified.certified)) is not None:
        islands = found
        verified.certified.release()
        verified = candidate.write_and_verify(islands)
    verified = candidate.with_fp32_convolutions(verified, islands)
    verified.searches, verified.sentences, verified.remarks = search.results, search.sentences(), search.remarks()
    return verified


def _judge_and_publish(job: Job, verified: Verified, judged_by: Judge | None) -> Result:
    """Judge what was measured, locate drift by layer, write the report, and rename the artifact into place."""
    options, stage, certified = job.options, job.stage, verified.certified
    job.notes += [*certified.notes, *_artifact_notes(options, certified.manifest)]
    check_stated_bounds(options.budget, certified.manifest)
    manifest, left_out = judge(certified.breaches, certified.manifest, options, stage)
    job.notes += left_out
    recovery = None
    if judged_by is not None:
        manifest, recovery, remarks = judged_by(stage, manifest, job.progress)
        job.notes += remarks
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


def build_measurements(
    manifest: Manifest,
    verified: Verified,
    layers: Mapping[str, Layers],
    feeds: Sequence[Feeds],
    recovery: RecoveryEntry | None = None,
) -> Measurements:
    """Return the content of ``measurements.json`` for the published profiles."""
    runs = verified.certified.runs
    slices = {profile: _worst_slices(runs[profile].drifts) for profile in manifest.drift}
    columns = sample_columns({name: run.rows() for name, run in runs.items()})
    profiles = {}
    for profile in manifest.drift:
        search = verified.searches.get(profile)
        profiles[profile] = ProfileMeasurements(
            outputs=columns[profile],
            slices=slices[profile],
            layers=layers.get(profile),
            search=None if search is None else search.entry,
        )
    ranged = ranges(verified.census)
    return Measurements(profiles=profiles, ranges=ranged, inputs=input_ranges(feeds), recovery=recovery)


def _worst_slices(drifts: Sequence[Mapping[str, OutputDrift]]) -> dict[str, list[SliceEntry]]:
    """Return the slices with the largest errors over all samples, by output."""
    found = {output: worst_of([one[output] for one in drifts], MOST_SLICES) for output in drifts[0]}
    return {
        output: [SliceEntry(error=each.error, axis=each.axis, index=each.index) for each in worst]
        for output, worst in found.items()
        if worst
    }


def publish(
    options: Options,
    stage: StagingArtifact,
    manifest: Manifest,
    measurements: Measurements,
    notes: Sequence[str],
    progress: Progress,
) -> Artifact:
    """Write measurements and report into ``stage``, and rename it into place."""
    with progress.step("publishing"):
        measured = measurements.dumps()
        if len(measured) > MAX_BYTES:
            raise ConversionError(
                f"{MEASUREMENTS} would have {len(measured)} bytes, and readers take {MAX_BYTES}; shorten the names of"
                " the model's nodes"
            )
        (stage.path / MEASUREMENTS).write_bytes(measured)
        manifest = manifest.amended(measurements=MEASUREMENTS)
        if options.report:
            files = stage.draft(manifest).manifest.files
            drawn = page.render(manifest, files, notes, measurements)
            (stage.path / page.NAME).write_text(drawn, encoding="utf-8")
        return stage.publish(manifest)
