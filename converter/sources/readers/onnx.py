"""Reads an ONNX file as a source, with its own graph and oracle."""

from __future__ import annotations

from bf16kit.errors import ConversionError, UsageError
from converter.model import Checkpoint, Source, digest_files
from converter.options import Options
from converter.sources.detect import Kind
from converter.sources.readers.common import Advance


def read(options: Options, _kind: Kind, advance: Advance) -> Source:
    """Return the file as a source; :class:`ConversionError` if it holds no fp32 weights."""
    from converter.passes.constants import floating_tensors
    from converter.sources import onnx_file, oracles

    if options.model is not None:
        raise UsageError("--model: an ONNX file brings its own architecture")
    model, files = onnx_file.read_graph(options.source)
    oracle = oracles.of_onnx(options.source, model)
    inputs, outputs = onnx_file.resolve_edges(model, options.inputs)
    tensors = floating_tensors(model)
    if not any(tensor.dtype.name == "float32" for tensor in tensors.values()):
        raise ConversionError(f"{options.source}: holds no fp32 weights, so there is nothing to convert")
    checkpoint = Checkpoint("onnx", digest_files(files, advance), tensors)
    return Source(checkpoint, model, inputs, outputs, tools=("onnxscript",), oracle=oracle)
