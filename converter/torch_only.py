"""Converts a source without an ONNX graph: only what torch runs is written, and it is compared with the source itself.

Without an ONNX graph the artifact has no plan, no fp32 islands and no reference. The rest is verified as usual: the
served file is run on the samples and its outputs are compared with the source's, in fp32.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from bf16kit.artifact.manifest import RESIDUAL, Plan
from bf16kit.messages.errors import ConversionError
from converter.candidate import Verified
from converter.job import Job
from converter.process.memory import release_memory
from converter.verify.certify import certify
from converter.verify.oracle import OracleReference
from converter.write.readback import check_without_graph
from converter.write.recordweights import read_records, write_without_graph


def write_and_verify(job: Job) -> Verified:
    """Write what restores the weights beside the traced profiles, then run those profiles.

    The weights are those in the first traced file. Raises :class:`ConversionError` if the source has no outputs to
    compare with, or if no profile is left that runs.
    """
    options, source, stage, checkpoint = job.options, job.source, job.stage, job.source.checkpoint
    oracle = source.oracle
    if oracle is None or not job.answers.outputs:
        raise ConversionError(
            f"{options.source}: {source.no_graph_reason}; and the format that torch runs cannot be checked:"
            f" {job.answers.how}"
        )
    records = read_records(stage.path / next(iter(job.traced.values())).graph)
    with job.progress.step("writing weights", checkpoint.nbytes) as advance, ExitStack() as files:
        residual = files.enter_context(stage.writer(RESIDUAL)) if options.residual else None
        stored = write_without_graph(checkpoint.tensors, records, residual, advance)
    manifest = job.draft_manifest(Plan(), stored, job.traced)
    with job.progress.step("comparing with the source", checkpoint.nbytes) as advance:
        check_without_graph(stage.draft(manifest), checkpoint.tensors, advance)
    release_memory()
    answers = replace(job.answers, how=f"{job.answers.how}, which is the reference")
    reference = OracleReference(oracle, source.rowwise)
    try:
        certified = certify(stage, manifest, job.samples, options, job.progress, answers, reference)
    except ConversionError as error:
        raise ConversionError(f"{options.source}: no ONNX: {source.no_graph_reason}; {error}") from error
    return Verified(certified, stored.census)
