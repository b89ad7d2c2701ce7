"""Converts a source without an ONNX graph: only what torch runs is written, and it is compared with the source itself.

Without an ONNX graph the artifact has no plan, no fp32 islands and no reference. The rest is proved as
usual: the served file is run on the samples and its outputs are compared with the source's, in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace

from bf16kit.artifact.manifest import RESIDUAL, Plan, ProfileEntry
from bf16kit.artifact.publish import StagingArtifact
from bf16kit.messages.errors import ConversionError, UsageError
from bf16kit.numerics.rounding import Census
from converter.attempt import draft_manifest
from converter.options import Options
from converter.process.memory import release_memory
from converter.process.progress import Progress
from converter.source import Source
from converter.verify.certify import Certified, certify
from converter.verify.oracle import OracleRun
from converter.verify.oraclereference import OracleReference
from converter.verify.samples import Samples
from converter.write.readback import check_without_graph
from converter.write.weights import StoredWeights
from converter.write.withoutgraph import FileRecords, read_records, write_without_graph


def check_options(options: Options, source: Source) -> str:
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


_REMEDY = "leave out --format or pass --format torchscript to write only what torch runs"


def prove(
    options: Options,
    source: Source,
    traced: Mapping[str, ProfileEntry],
    calibration: Samples,
    oracle_run: OracleRun,
    stage: StagingArtifact,
    progress: Progress,
) -> tuple[Certified, Mapping[str, Census]]:
    """Write what restores the weights beside the ``traced`` profiles, then run those profiles.

    Returns what running them proved, and each tensor's census of rounding. Raises :class:`ConversionError` if the
    source has no answers to compare with, or if no profile is left that runs.
    """
    oracle = source.oracle
    if oracle is None or not oracle_run.outputs:
        raise ConversionError(
            f"{options.source}: {source.no_graph_reason}; and the format that torch runs cannot be checked:"
            f" {oracle_run.how}"
        )
    stored = _write(options, source, _weight_records(traced, stage), stage, progress)
    manifest = draft_manifest(options, source, Plan(), stored, traced)
    with progress.step("comparing with the source", source.checkpoint.nbytes) as advance:
        check_without_graph(stage.draft(manifest), source.checkpoint.tensors, advance)
    release_memory()
    reference_run = replace(oracle_run, how=f"{oracle_run.how}, which is the reference")
    reference = OracleReference(oracle, source.rowwise)
    try:
        certified = certify(stage, manifest, calibration, options, progress, reference_run, reference)
    except ConversionError as error:
        raise ConversionError(f"{options.source}: no ONNX: {source.no_graph_reason}; {error}") from error
    return certified, stored.census


def _weight_records(traced: Mapping[str, ProfileEntry], stage: StagingArtifact) -> FileRecords:
    """Return the records of the weights in the first ``traced`` file."""
    return read_records(stage.path / next(iter(traced.values())).graph)


def _write(
    options: Options, source: Source, weight_records: FileRecords, stage: StagingArtifact, progress: Progress
) -> StoredWeights:
    checkpoint = source.checkpoint
    with progress.step("writing weights", checkpoint.nbytes) as advance, ExitStack() as files:
        residual = files.enter_context(stage.writer(RESIDUAL)) if options.residual else None
        return write_without_graph(checkpoint.tensors, weight_records, residual, advance)
