"""Reads a TensorFlow SavedModel or a Keras model as a source.

TensorFlow opens, translates and runs it in a separate process; tf2onnx makes the graph.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bf16kit.messages.errors import ConversionError, UsageError
from bf16kit.messages.wording import quoted
from converter.options import Options
from converter.read.detect import Kind
from converter.read.sources import Advance, check_trusted, precision_notes
from converter.source import Checkpoint, Oracle, Source, digest_files

if TYPE_CHECKING:
    import onnx_ir as ir

    from converter.source import Array

_OPSET = 18  # the newest that tf2onnx writes
_CALLS = re.compile(r"^((Stateful)?PartitionedCall(_\d+)?/)+")  # prefixes of functions that were inlined


def read(options: Options, kind: Kind, advance: Advance) -> Source:
    """Return the model as a source.

    Raises :class:`UsageError` when TensorFlow is missing, :class:`SourceError` for a program that is not trusted and
    for damaged files, :class:`ConversionError` for a model that cannot be translated.
    """
    from converter.read import oracles
    from converter.read.onnx_file import read_graph, resolve_edges
    from converter.read.tensorflow import process

    if options.model is not None:
        raise UsageError(f"--model: {kind.value} brings its own architecture")
    if kind is Kind.SAVED_MODEL:
        check_trusted(options, kind.value)
    python = process.require()
    sha256 = digest_files(_files(options.source, kind), advance)
    request = {
        "keras": kind is Kind.KERAS,
        "trusted": options.trust_code,
        "signature": options.signature,
        "opset": _OPSET,
    }
    child = process.TensorFlowProcess(python, options.source, request)
    graph, _ = read_graph(child.directory / "model.onnx")
    for node in graph.graph.all_nodes():
        node.name = _CALLS.sub("", node.name or "")  # the converter makes names unique, and names values by their nodes
        for value in node.outputs:
            value.name = value.name if value.is_graph_output() else None
    stored = child.variables()
    tensors, notes = _weights(options.source, stored, graph)
    inputs, outputs = resolve_edges(graph, options.inputs)
    unused = set(child.reply["inputs"]) - {spec.name for spec in inputs}
    notes += [f"input {quoted(name)} has no effect on any output, and is left out" for name in sorted(unused)]
    notes += [
        f"output {quoted(old)} was renamed to {quoted(new)}, because an input has the same name"
        for old, new in child.reply["renamed"].items()
    ]
    versions = child.reply["versions"]
    how = f"TensorFlow {versions['tensorflow']} running the model's own signature {quoted(child.reply['signature'])}"
    return Source(
        Checkpoint("keras" if kind is Kind.KERAS else "saved-model", sha256, tensors),
        graph,
        inputs,
        outputs,
        tools=("onnxscript",),
        foreign_versions=versions,
        oracle=Oracle(child.outputs, f"{how} on the CPU", oracles.roundoff(graph)),
        notes=(*notes, *precision_notes(options, tensors)),
    )


def _files(source: Path, kind: Kind) -> list[Path]:
    variables = source / "variables"
    index, data = variables.glob("variables.index"), variables.glob("variables.data-*")
    return [source] if kind is Kind.KERAS else [source / "saved_model.pb", *index, *sorted(data)]


def _weights(source: Path, stored: dict[str, Array], graph: ir.Model) -> tuple[dict[str, Array], list[str]]:
    """Return the stored variables; for a model without fp32 variables, the graph's constants, which are its weights."""
    from converter.rewrite.explicit import floating_tensors

    if _any_fp32(stored):
        return stored, []
    constants = floating_tensors(graph)
    if not _any_fp32(constants):
        raise ConversionError(f"{source}: holds no fp32 variables or weights, so there is nothing to convert")
    note = "the model has no fp32 variables: its weights are constants of its graph, named as tf2onnx names them"
    return {**stored, **constants}, [note]


def _any_fp32(tensors: Mapping[str, Array]) -> bool:
    return any(tensor.dtype.name == "float32" for tensor in tensors.values())
