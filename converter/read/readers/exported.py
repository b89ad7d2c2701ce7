"""Reads a torch.export program (.pt2) as a source, with its own operators and weights."""

from __future__ import annotations

from dataclasses import replace

from bf16kit.messages.errors import RuntimeFailure, SourceError, UsageError
from converter.options import Options
from converter.read.detect import Kind
from converter.read.readers.common import Advance, exported_source
from converter.source import Checkpoint, Source, digest_files

# torch.export.load would unpickle what the file says, so this converter reads the program.
_HOW = "the program's own operators in torch, called in its order by this converter, fp32, on the CPU"


def read(options: Options, _kind: Kind, advance: Advance) -> Source:
    """Return the file as a source: a module that calls the program's operators, exported like any other module."""
    from converter.read import exported_program, onnx_file, oracles, precisions, statedict
    from converter.read.torch.onnx_export import adapt
    from converter.read.torch.program import ProgramModule

    if options.model is not None:
        raise UsageError("--model: a torch.export program brings its own architecture")
    found = exported_program.read_file(options.source, trust_pickle=options.trust_code)
    precisions.check_range(options.source, found.tensors)
    try:
        module = ProgramModule(found.program, found.tensors, found.parameters, found.non_fp32_dtypes)
    except RuntimeFailure as error:
        raise SourceError(f"{options.source}: {error}") from None
    inputs = onnx_file.resolve_inputs(found.inputs(), options.inputs)
    checkpoint = Checkpoint("torch-export", digest_files([options.source], advance), found.tensors)
    widened = statedict.in_fp32(module).eval()
    unchanged = oracles.UnchangedTensors(widened)  # its tensors share the checkpoint's memory
    model = adapt(widened, inputs)
    unchanged.check("running the program")
    notes = (*found.notes, *precisions.notes(found.tensors, residual=options.residual))
    oracle = replace(oracles.of_module(model), how=_HOW)
    return replace(exported_source(checkpoint, model, None), notes=notes, oracle=oracle)
