"""The steps of a conversion, in order: read the source → plan → fold → narrow → write graphs → verify by running →
measure drift → rename into place → report. The steps are in ``intake``, ``attempt`` and ``publishing``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import Manifest, ProfileEntry
from bf16kit.artifact.publish import StagingArtifact, staging
from bf16kit.artifact.recoveryentries import RecoveryEntry
from bf16kit.numerics.rounding import Census
from converter import intake, withoutgraph
from converter.attempt import Attempt
from converter.islands.explanation import measure_layers
from converter.islands.islandsearch import IslandSearches
from converter.islands.result import SearchResult
from converter.islands.trials import Deadline
from converter.options import Options
from converter.plan.decisions import Islands
from converter.process.memory import FrozenHeap
from converter.process.naming import prefix_errors
from converter.process.progress import Progress, SilentProgress
from converter.publishing import build_measurements, publish
from converter.report.page import check_installed
from converter.rewrite import prepare
from converter.source import Source
from converter.verify.certify import Certified
from converter.verify.judging import check_stated_bounds, judge
from converter.verify.oracle import OracleRun
from converter.verify.samples import Samples
from converter.write.exportweights import unfolded


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

    read: Callable[[Callable[[int], None]], Source]
    samples: Samples | None = None
    judge: Callable[[StagingArtifact, Manifest, Progress], Judgement] | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """A published artifact, and notes for the user: one sentence each."""

    artifact: Artifact
    notes: tuple[str, ...]


def convert(options: Options, progress: Progress | None = None, provided: ProvidedInputs | None = None) -> Result:
    """Convert ``options.source`` into an artifact at ``options.target``; nothing is published unless all succeeds.

    Raises :class:`UsageError` for bad options or unreadable input,
    :class:`ConversionError` for a model that cannot be converted,
    :class:`RuntimeFailure` if a written file does not run, and :class:`BudgetExceeded`
    if drift is over budget and the options do not allow that.
    """
    if options.report:
        check_installed()
    progress = progress or SilentProgress()
    notes: list[str] = []
    with (
        FrozenHeap() as heap,
        prefix_errors(options.source),
        staging(options.target.path, force=options.force) as stage,
    ):
        with heap.without_collection():
            source = intake.read(options, progress, None if provided is None else provided.read)
        notes += source.notes
        if source.graph is None:
            notes.append(withoutgraph.check_options(options, source))
        provided_samples = None if provided is None else provided.samples
        calibration = provided_samples or intake.load_samples(options, source, progress)
        if not (options.samples or provided_samples):
            notes.append(f"drift was measured on {calibration.origin}, because --samples was not given")
        oracle_run, calibration = intake.record_source_outputs(options, source, calibration, stage, progress)
        notes += intake.check_expected_outputs(options, source, calibration, oracle_run, progress)
        profiles = intake.write_traced_formats(options, source, stage, progress, notes)
        heap.collect()
        proven = _prove(options, source, profiles, calibration, oracle_run, stage, progress)
        del source, oracle_run  # its noise holds the source's graph
        heap.collect()
        certified = proven.certified
        notes += [*proven.notes, *certified.notes]
        notes += _artifact_notes(options, certified.manifest)
        check_stated_bounds(options.budget, certified.manifest)
        manifest, left_out = judge(certified.breaches, certified.manifest, options, stage)
        notes += left_out
        judged = None
        if provided is not None and provided.judge is not None:
            judged = provided.judge(stage, manifest, progress)
            manifest = judged.manifest
            notes += judged.notes
        remedies_for = [name for name, found in certified.breaches.items() if found and options.search]
        expired = Deadline.after(options.search_minutes).expired
        draft = stage.draft(manifest)
        # Measuring one profile's layers takes a tenth of a conversion: optional profiles leave that to `explain`.
        optional = options.optional_profiles
        layers = measure_layers(
            draft,
            calibration.feeds,
            stage.path,
            progress,
            notes,
            remedies_for=remedies_for,
            expired=expired,
            without=optional,
        )
        measurements = build_measurements(
            manifest, certified, layers, proven.census, proven.searches, calibration.given
        )
        if judged is not None:
            measurements = measurements.model_copy(update={"recovery": judged.recovery})
        # Without `sentences`: the page reads a search's results from the measurements, and shows them beside the
        # islands.
        artifact = publish(options, stage, manifest, measurements, [*notes, *proven.remarks], progress)
    return Result(artifact, (*notes, *proven.sentences))


@dataclass(frozen=True, slots=True)
class _Proven:
    """The result of writing and running: what that proved, the census of rounding, and the searches for fp32 islands.

    ``sentences`` tell the user about the islands; ``remarks`` are those of them that the measurements do not hold.
    """

    certified: Certified
    census: Mapping[str, Census]
    notes: Sequence[str] = ()
    searches: Mapping[str, SearchResult] = field(default_factory=dict)
    sentences: Sequence[str] = ()
    remarks: Sequence[str] = ()


def _prove(
    options: Options,
    source: Source,
    profiles: Mapping[str, ProfileEntry],
    calibration: Samples,
    oracle_run: OracleRun,
    stage: StagingArtifact,
    progress: Progress,
) -> _Proven:
    """Plan, narrow, write and run, until the result is within budget or nothing more can be done about it."""
    if source.graph is None:
        return _Proven(*withoutgraph.prove(options, source, profiles, calibration, oracle_run, stage, progress))
    with progress.step("planning"):
        prepared = prepare(source.graph, source.checkpoint.tensors, orders=source.checkpoint.orders)
        if options.stores_export:
            prepared = unfolded(prepared, source.checkpoint.tensors)
    notes = list(intake.unknown_notes(options, prepared))
    intake.check_prepared_graph(options, source, prepared, oracle_run, calibration, stage, progress)
    attempt = Attempt(options, source, prepared, profiles, calibration, oracle_run, stage, progress)
    island_searches = IslandSearches(prepared, options, calibration, progress, stage.path)
    certified, census = attempt.prove(Islands())
    while (islands := island_searches.next_islands(certified)) is not None:
        certified, census = attempt.prove(islands)
    return _Proven(
        certified, census, notes, island_searches.results, island_searches.sentences(), island_searches.remarks()
    )


def _artifact_notes(options: Options, manifest: Manifest) -> Iterator[str]:
    """Yield notes on properties of the artifact that its owner may not expect."""
    if not any(entry.dtype == "bfloat16" for entry in manifest.tensors):
        yield "no weight became bf16, so no memory is saved: all are small, one-dimensional or kept in fp32"
    if not options.residual:
        yield "--no-residual: the rounded weights were checked, but the checkpoint cannot be restored"
