"""The first part of a conversion: read the source, record its answers, write torch's formats, and check the graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from bf16kit.artifact.manifest import ProfileEntry
from bf16kit.artifact.publish import StagingArtifact
from bf16kit.messages.errors import ConversionError
from converter import read as sources
from converter.graph.cuda_kernels import other_release_note
from converter.graph.types import untyped
from converter.options import Options
from converter.plan.profiles import PROFILES
from converter.process.memory import release_memory
from converter.process.progress import Progress
from converter.read.mapping.choice import map_refuted
from converter.read.onnx_file import name_inputs
from converter.rewrite import Prepared
from converter.source import Source
from converter.verify import givenoutputs, samples
from converter.verify.judging import check_budget, with_output_kinds
from converter.verify.oracle import OracleRun, run_oracle
from converter.verify.perturbed import with_enough
from converter.verify.preparation import check_prepared
from converter.verify.random_samples import generate
from converter.verify.samples import Samples
from converter.write.traced import TRACED

_NO_MODULE = "this format is made from a torch module, and the source is read as an ONNX graph"
_DECLARING = ("onnx", "saved-model", "keras")  # these sources declare their own dimensions


def read(
    options: Options, progress: Progress, reader: Callable[[Callable[[int], None]], Source] | None = None
) -> Source:
    """Return the source, read from ``options`` or by ``reader``, with notes and the output kinds of ``--output``.

    Raises what reading raises, and :class:`UsageError` for a bound that no output can be judged by.
    """
    total = sources.nbytes(options.source)
    with progress.step(f"reading {options.source.name}", total) as advance:
        source = sources.read(options, advance) if reader is None else reader(advance)
    source.outputs = with_output_kinds(source.outputs, options.outputs)
    source.notes = tuple(dict.fromkeys((*check_budget(options.budget, source.outputs), *source.notes)))
    return source


def load_samples(options: Options, source: Source, progress: Progress) -> Samples:
    """Load the samples asked for, or generate random ones.

    For an ONNX file, the samples may show other dimensions than it declares. From here on those shown are used, unless
    ``--input`` gave the dimensions.
    """
    oracle = source.oracle
    outputs = None if oracle is None else oracle.outputs
    with progress.step("checking the samples"):
        if options.samples is None:
            return generate(source.inputs, source.graph, source.sampler, options.seed, outputs)
        run_source = None if outputs is None else lambda feeds: deque(outputs(feeds), maxlen=0)
        may_contradict = source.checkpoint.format in _DECLARING and not options.inputs
        names = [spec.name for spec in source.outputs]
        found = samples.load(options.samples, source.inputs, run_source if may_contradict else None, outputs=names)
    if found.inputs:
        source.inputs = found.inputs
        if source.graph is not None:
            name_inputs(source.graph, found.inputs)
    return found


def record_source_outputs(
    options: Options, source: Source, calibration: Samples, stage: StagingArtifact, progress: Progress
) -> tuple[OracleRun, Samples]:
    """Record the source's own answers, before narrowing and folding change it; also return enough samples to judge by.

    The oracle is released afterwards, unless it is the only reference there will be.
    """
    with progress.step("asking the source itself"):
        oracle_run = run_oracle(source, calibration.feeds, stage.path)
        if source.oracle is not None:
            calibration = with_enough(
                calibration,
                source.inputs,
                source.outputs,
                oracle_run.outputs,
                source.oracle,
                options.budget,
                options.seed,
            )
    if source.graph is not None:
        source.oracle = None
    return oracle_run, calibration


def check_expected_outputs(
    options: Options, source: Source, calibration: Samples, oracle_run: OracleRun, progress: Progress
) -> Iterator[str]:
    """Compare the source's answers with the outputs that came with the samples; yield a sentence on the result.

    If they differ, raises :class:`UsageError` with the proposed map where there is one, else
    :class:`ConversionError`.
    """
    if source.proposed_rules is None and not calibration.expected:
        return
    if not calibration.expected:
        raise map_refuted(
            f"{options.source}", f"{calibration.origin} holds inputs but no outputs", source.proposed_rules or ""
        )
    with progress.step("comparing with the expected outputs"):
        wrong = givenoutputs.check(calibration, oracle_run)
    if wrong is not None and source.proposed_rules is not None:
        raise map_refuted(f"{options.source}", wrong, source.proposed_rules)
    if wrong is not None:
        raise ConversionError(
            f"{options.source}: the model does not give the outputs in {calibration.origin}: {wrong}; either the"
            " architecture or the weights differ, or those outputs were not computed in fp32"
        )
    confirmation = (
        "the proposed map is confirmed" if source.proposed_rules is not None else "the expected outputs are confirmed"
    )
    yield f"{confirmation}: the model's outputs equal those in {calibration.origin} within fp32 noise"


def write_traced_formats(
    options: Options, source: Source, stage: StagingArtifact, progress: Progress, notes: list[str]
) -> dict[str, ProfileEntry]:
    """Write the wanted formats that are made from the torch module, and release the module.

    Raises :class:`ConversionError` if a format that was asked for cannot be written, or if nothing else would be left.
    """
    module, source.module = source.module, None
    written: dict[str, ProfileEntry] = {}
    for name in options.traced:
        traced = TRACED[name]
        try:
            if module is None:
                raise ConversionError(f"--format {name}: {_NO_MODULE}" if options.requires(name) else _NO_MODULE)
            with progress.step(traced.step_name):
                traced.write(module, stage.path / traced.file, strictly=source.graph is None)
        except ConversionError as error:
            if source.graph is None and not written:
                raise ConversionError(f"no ONNX: {source.no_graph_reason}; no {traced.title}: {error}") from error
            if options.requires(name):
                raise
            notes.append(f"no {traced.title}: {error}")
            continue
        written[name] = ProfileEntry(format=traced.format, graph=traced.file, precision="bf16", verified="no")
        if options.keep_fp32 or options.bf16:
            notes.append(
                f"--keep-fp32 and --bf16 apply to ONNX nodes only; the {traced.title} follows torch.autocast's rules"
            )
    return written


def unknown_notes(options: Options, prepared: Prepared) -> Iterator[str]:
    """Yield a note on each thing unknown about the graph or the device, and what that costs."""
    nodes, all_nodes = untyped(prepared.base), sum(1 for _ in prepared.base.graph.all_nodes())
    if nodes:
        yield (
            f"the output types of {len(nodes)} of {all_nodes} nodes could not be inferred, the first"
            f" {nodes[0].name!r} ({nodes[0].op_type}); these nodes, and those that read their outputs, stay in fp32"
        )
    sentence = other_release_note() if "cuda" in options.onnx_profiles else None
    if sentence is not None:
        yield sentence


def check_prepared_graph(
    options: Options,
    source: Source,
    prepared: Prepared,
    oracle_run: OracleRun,
    calibration: Samples,
    stage: StagingArtifact,
    progress: Progress,
) -> None:
    """Run the graph that the profiles start from; for cuda, it has been through the other profiles' passes too."""
    profiles = options.onnx_profiles
    if profiles:
        base = PROFILES["cuda" if "cuda" in profiles else profiles[0]].base(prepared)
        with progress.step("checking the prepared graph"):
            check_prepared(oracle_run, prepared, base, (source.inputs, source.outputs), calibration.feeds, stage.path)
            release_memory()
