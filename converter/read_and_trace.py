"""The first part of a conversion: read the source, record its own outputs, and write torch's formats."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from bf16kit.artifact.manifest import Manifest, Plan, ProfileEntry, SpecEntry
from bf16kit.artifact.manifest import Source as SourceEntry
from bf16kit.artifact.publish import StagingArtifact
from bf16kit.converter import read as sources
from bf16kit.converter.graph.dimensions import SIZES, broken, sizes_note
from bf16kit.converter.options import Options
from bf16kit.converter.process import program
from bf16kit.converter.process.progress import Progress
from bf16kit.converter.read.onnx_file import name_inputs
from bf16kit.converter.source import Feeds, Source
from bf16kit.converter.verify import samples
from bf16kit.converter.verify.judging import check_budget, with_output_kinds
from bf16kit.converter.verify.oracle import OracleRun, check_expected_outputs, run_oracle
from bf16kit.converter.verify.random_samples import generate, with_enough
from bf16kit.converter.verify.samples import Samples
from bf16kit.converter.write import TRACED
from bf16kit.converter.write.weights import StoredWeights
from bf16kit.messages.errors import ConversionError, RuntimeFailure, UsageError

_NO_MODULE = "this format is made from a torch module, and the source is read as an ONNX graph"
_REMEDY = "leave out --format or pass --format torchscript to write only what torch runs"
_DECLARING = ("onnx", "saved-model", "keras")  # these sources declare their own dimensions


@dataclass(slots=True)
class Job:
    """One conversion: what was asked for, what was read, and where it is written.

    ``source_run`` holds the source's own outputs for the first samples. ``traced`` are the profiles that were written
    from the torch module. ``notes`` are for the user: one sentence each.
    """

    options: Options
    stage: StagingArtifact
    progress: Progress
    source: Source
    samples: Samples
    source_run: OracleRun
    traced: dict[str, ProfileEntry] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def release_source(self) -> None:
        """Free the source, with its graph and outputs: nothing needs it once the artifact is written and verified.

        A graph refers to itself, and is set aside from collections. So what it holds of the weights is dropped here.
        """
        if self.source.graph is not None:
            for value in self.source.graph.graph.initializers.values():
                value.const_value = None
        del self.source, self.source_run

    def draft_manifest(self, plan: Plan, stored: StoredWeights, profiles: Mapping[str, ProfileEntry]) -> Manifest:
        """Return the manifest with all that is known before anything has run."""
        options, source = self.options, self.source
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
            tools={**program.versions([*source.tools, *drawn_by]), **source.foreign_versions},
            seed=options.seed,
            options=options.recorded(),
        )


def read(
    options: Options, progress: Progress, reader: Callable[[Callable[[int], None]], Source] | None = None
) -> Source:
    """Return the source, read from ``options`` or by ``reader``, with notes and the output kinds of ``--output``.

    Raises what reading raises, and :class:`UsageError` for a bound that no output can be judged by.
    """
    total = sources.nbytes(options.source)
    if options.samples is not None:
        samples.check_named(options.samples)  # now, because reading a large source takes minutes
        options = replace(options, examples=partial(samples.examples, options.samples))
    with progress.step(f"reading {options.source.name}", total, then="making its graph") as advance:
        source = sources.read(options, advance) if reader is None else reader(advance)
    source.outputs = with_output_kinds(source.outputs, options.outputs)
    source.notes = tuple(dict.fromkeys((*check_budget(options.budget, source.outputs), *source.notes)))
    if source.graph is None:
        source.notes = (*source.notes, _without_graph(options, source))
    return source


def _without_graph(options: Options, source: Source) -> str:
    """Return a note on what is left out of the artifact because ``source`` has no ONNX graph.

    Raises :class:`ConversionError` with the reason if an option needs the graph. Raises :class:`UsageError` if an
    option sets how weights are rounded, because torch supports only one way.
    """
    reason = source.no_graph_reason
    if "onnx" in options.formats:
        raise ConversionError(f"{options.source}: no ONNX graph can be made of it: {reason}; {_REMEDY}")
    if options.export is not None:
        raise ConversionError(
            f"{options.source}: --format {options.export}: an export is checked by running it as an ONNX graph, and"
            f" no ONNX graph can be made: {reason}; {_REMEDY}"
        )
    for flag, given in (("--subnormals flush", options.subnormals == "flush"), ("--saturate", options.saturate)):
        if given:
            raise UsageError(f"{flag}: is for ONNX, and no ONNX graph can be made of {options.source}: {reason}")
    return (
        f"no ONNX: {reason}; the artifact holds only what torch runs. It has no fp32 islands, and no fp32 reference for"
        " live drift and fallback"
    )


def run_source_model(
    options: Options, source: Source, provided: Samples | None, stage: StagingArtifact, progress: Progress
) -> Job:
    """Find samples, enough to judge by, and record the source's own outputs before narrowing and folding change it.

    The oracle is released afterwards, unless it is the only reference there will be. Raises :class:`ConversionError` if
    the outputs that came with the samples are not the source's own.
    """
    notes = list(source.notes)
    found = provided or _load_samples(options, source, progress)
    if not (options.samples or provided):
        notes.append(f"drift was measured on {found.origin}, because --samples was not given")
    with progress.step("running the source model"):
        outputs = run_oracle(source, found.feeds, stage.path)
        if source.oracle is not None:
            found = with_enough(
                found, source.inputs, source.outputs, outputs.outputs, source.oracle, options.budget, options.seed
            )
    if source.graph is not None:
        source.oracle = None
        conditions, checked = source.graph.meta.get(SIZES, []), found.feeds[: len(outputs.outputs)]
        # One that these break does not matter, or they will show that the graph is wrong.
        if unbroken := [each for each in conditions if broken([each], source.inputs, checked) is None]:
            notes.append(sizes_note(unbroken))
    if found.expected:
        with progress.step("comparing with the expected outputs"):
            wrong = check_expected_outputs(found, outputs)
        if wrong:
            raise ConversionError(
                f"{options.source}: the model does not give the outputs in {found.origin}: {wrong}; either the"
                " architecture or the weights differ, or those outputs were not computed in fp32"
            )
        notes.append(
            f"the expected outputs are confirmed: the model's outputs equal those in {found.origin} within fp32 noise"
        )
    return Job(options, stage, progress, source, found, outputs, notes=notes)


def _load_samples(options: Options, source: Source, progress: Progress) -> Samples:
    """Load the samples asked for, or generate random ones.

    For an ONNX file, the samples may show other dimensions than it declares. From here on those shown are used, unless
    ``--input`` gave the dimensions.
    """
    outputs = None if source.oracle is None else source.oracle.outputs
    with progress.step("checking the samples"):
        if options.samples is None:
            return generate(source.inputs, source.graph, source.sampler, options.seed, outputs)

        def run_source(feeds: Sequence[Feeds]) -> None:
            if outputs is not None:
                deque(outputs(feeds), maxlen=0)

        may_contradict = outputs is not None and source.checkpoint.format in _DECLARING and not options.inputs
        names = [spec.name for spec in source.outputs]
        found = samples.load(options.samples, source.inputs, run_source if may_contradict else None, outputs=names)
    if found.inputs:
        source.inputs = found.inputs
        if source.graph is not None:
            name_inputs(source.graph, found.inputs)
    return found


@contextmanager
def branches_named(job: Job) -> Iterator[None]:
    """Add to an error that the samples' sizes break what tracing has taken for granted of them, if they do."""
    conditions = [] if job.source.graph is None else job.source.graph.meta.get(SIZES, [])
    inputs = job.source.inputs
    try:
        yield
    except (ConversionError, RuntimeFailure) as error:
        if (cause := broken(conditions, inputs, job.samples.feeds)) is not None:
            error.args = (f"{cause}\n{error}",)
        raise


def write_traced_formats(job: Job) -> None:
    """Write the wanted formats that are made from the torch module, and release the module.

    Raises :class:`ConversionError` if one of them cannot be written.
    """
    options, source = job.options, job.source
    module, source.module = source.module, None
    for name in options.traced(has_graph=source.graph is not None):
        traced = TRACED[name]
        try:
            if module is None:
                raise ConversionError(f"--format {name}: {_NO_MODULE}")
            with job.progress.step(traced.step_name):
                traced.write(module, job.stage.path / traced.file, strictly=source.graph is None)
        except ConversionError as error:
            if source.graph is not None:
                raise
            raise ConversionError(f"no ONNX: {source.no_graph_reason}; no {traced.title}: {error}") from error
        job.traced[name] = ProfileEntry(format=traced.format, graph=traced.file, precision="bf16", verified="no")
        if options.keep_fp32 or options.bf16:
            job.notes.append(
                f"--keep-fp32 and --bf16 apply to ONNX nodes only; the {traced.title} follows torch.autocast's rules"
            )
