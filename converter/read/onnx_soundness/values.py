"""Checks that every value of a graph is defined once, is visible where it is used, and matches its declaration."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

from bf16kit.messages.errors import ConversionError, SourceError
from converter.read.onnx_soundness.tensors import shape_of
from converter.read.onnx_soundness.walk import bodies, quoted


def check_names(path: Path, graph: GraphProto) -> None:
    """Check that one input, initializer or node defines each value.

    Up to IR version 3 inputs also list initializers.
    """
    initializers = [tensor.name for tensor in graph.initializer]
    inputs = [value.name for value in graph.input]
    produced = [name for node in graph.node for name in node.output if name]
    defined = [*set(inputs).union(initializers), *produced]
    for names in (initializers, inputs, defined):
        seen: set[str] = set()
        for name in names:
            if name in seen:
                raise SourceError(f"{path}: damaged: {quoted(name)} is defined twice")
            seen.add(name)
    if "" in (*inputs, *initializers):
        raise SourceError(f"{path}: damaged: an input or an initializer of graph {quoted(graph.name)} has no name")


def check_functions(path: Path, model: ModelProto) -> None:
    """Check that each function is defined once: of two, readers would take one or the other."""
    seen = set()
    for function in model.functions:
        known_by = (function.domain, function.name, function.overload)
        if known_by in seen:
            raise SourceError(f"{path}: damaged: function {quoted(function.name)} is defined twice")
        seen.add(known_by)


def check_declared(path: Path, graph: GraphProto) -> None:
    """Check that an initializer that is also an input matches the input's declaration."""
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    for value in graph.input:
        tensor = initializers.get(value.name)
        if tensor is not None and not _fits(value, tensor):
            dtype = TensorProto.DataType.Name(tensor.data_type)
            raise SourceError(
                f"{path}: damaged: {quoted(value.name)} is a tensor of {dtype}{shape_of(tensor)}, but is declared as"
                " an input of another type or shape"
            )


def _fits(value: ValueInfoProto, tensor: TensorProto) -> bool:
    if value.type.WhichOneof("value") not in (None, "tensor_type"):
        return False
    kind = value.type.tensor_type
    if kind.elem_type not in (TensorProto.UNDEFINED, tensor.data_type):
        return False
    if not kind.HasField("shape"):
        return True
    dims = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in kind.shape.dim]  # −1 occurs in files, too
    return len(dims) == len(tensor.dims) and all(a in (-1, b) for a, b in zip(dims, tensor.dims, strict=True))


def check_outputs(path: Path, model: ModelProto) -> None:
    """Check that each graph defines its own outputs.

    A subgraph that returns a value of an outer graph is valid, but neither ONNX Runtime nor onnx_ir supports it:
    :class:`ConversionError`.
    """
    _check_graph(path, model.graph, ())
    for function in model.functions:
        _check_bodies(path, function.node, set(function.input))
        produced = (name for node in function.node for name in node.output)
        _check_outputs_defined(path, function.output, {*function.input, *produced}, ())


def _check_graph(path: Path, graph: GraphProto, outer: Collection[str]) -> None:
    sources = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    sources |= {tensor.values.name for tensor in graph.sparse_initializer}
    produced = (name for node in graph.node for name in node.output if name)
    _check_outputs_defined(path, [value.name for value in graph.output], sources.union(produced), outer)
    _check_bodies(path, graph.node, sources.union(outer))


def _check_bodies(path: Path, nodes: Iterable[NodeProto], before: set[str]) -> None:
    """Check the subgraphs of ``nodes``; ``before`` holds the visible values, and each node's outputs are added to it.

    The recursion is no deeper than the nesting that protobuf reads, which is less than a hundred.
    """
    for node in nodes:
        for body in bodies(node):
            _check_graph(path, body, before)
        before.update(filter(None, node.output))


def _check_outputs_defined(
    path: Path, outputs: Iterable[str], defined: Collection[str], outer: Collection[str]
) -> None:
    for name in outputs:
        if name and name not in defined and name in outer:
            raise ConversionError(
                f"{path}: a body returns {quoted(name)}, a value of the graph around it, which ONNX Runtime does not"
                " run; put an Identity between them"
            )
        if name not in defined:
            raise SourceError(f"{path}: damaged: no node, input or initializer gives the output {quoted(name)}")
