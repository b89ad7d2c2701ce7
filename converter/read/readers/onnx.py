"""Reads an ONNX file as a source, with its own graph and oracle."""

from __future__ import annotations

from bf16kit.messages.errors import ConversionError, UsageError
from converter.options import Options
from converter.read.detect import Kind
from converter.read.readers.common import Advance
from converter.source import Checkpoint, Source, digest_files


def read(options: Options, _kind: Kind, advance: Advance) -> Source:
    """Return the file as a source; :class:`ConversionError` if it holds no fp32 weights."""
    from converter.read import onnx_file, oracles
    from converter.rewrite.explicit import floating_tensors

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
