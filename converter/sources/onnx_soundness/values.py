"""Whether every value of a graph is given once, from where it can be seen, and is what it is declared to be."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

from bf16kit.errors import ConversionError, SourceError
from converter.sources.onnx_soundness.tensors import shape_of
from converter.sources.onnx_soundness.walk import bodies, quoted


def check_names(path: Path, graph: GraphProto) -> None:
    """Each value is given once, by an input, an initializer or a node; up to IR version 3 inputs name initializers."""
    initializers = [tensor.name for tensor in graph.initializer]
    inputs = [value.name for value in graph.input]
    made = [name for node in graph.node for name in node.output if name]
    given = [*set(inputs).union(initializers), *made]
    for names in (initializers, inputs, given):
        seen: set[str] = set()
        for name in names:
            if name in seen:
                raise SourceError(f"{path}: damaged: {quoted(name)} is given twice")
            seen.add(name)
    if "" in (*inputs, *initializers):
        raise SourceError(f"{path}: damaged: an input or an initializer of graph {quoted(graph.name)} has no name")


def check_functions(path: Path, model: ModelProto) -> None:
    """Each function is defined once: of two, readers take one or the other."""
    seen = set()
    for function in model.functions:
        known_by = (function.domain, function.name, function.overload)
        if known_by in seen:
            raise SourceError(f"{path}: damaged: function {quoted(function.name)} is defined twice")
        seen.add(known_by)


def check_declared(path: Path, graph: GraphProto) -> None:
    """An initializer that is an input too is what the input is declared to be."""
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    for value in graph.input:
        tensor = initializers.get(value.name)
        if tensor is not None and not _fits(value, tensor):
            dtype = TensorProto.DataType.Name(tensor.data_type)
            raise SourceError(
                f"{path}: damaged: {quoted(value.name)} is a tensor of {dtype}{shape_of(tensor)}, and declared as an"
                " input of another type or shape"
            )


def _fits(value: ValueInfoProto, tensor: TensorProto) -> bool:
    if value.type.WhichOneof("value") not in (None, "tensor_type"):
        return False
    kind = value.type.tensor_type
    if kind.elem_type not in (TensorProto.UNDEFINED, tensor.data_type):
        return False
    if not kind.HasField("shape"):
        return True
    dims = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in kind.shape.dim]  # −1 is written, too
    return len(dims) == len(tensor.dims) and all(a in (-1, b) for a, b in zip(dims, tensor.dims, strict=True))


def check_outputs(path: Path, model: ModelProto) -> None:
    """Each output is given by its graph itself. A body that hands on a value of a graph around it is not damaged, and
    neither ONNX Runtime nor onnx_ir has a place for it: :class:`ConversionError`."""
    _check_graph(path, model.graph, ())
    for function in model.functions:
        _check_bodies(path, function.node, set(function.input))
        made = (name for node in function.node for name in node.output)
        _check_given(path, function.output, {*function.input, *made}, ())


def _check_graph(path: Path, graph: GraphProto, outer: Collection[str]) -> None:
    sources = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    sources |= {tensor.values.name for tensor in graph.sparse_initializer}
    made = (name for node in graph.node for name in node.output if name)
    _check_given(path, [value.name for value in graph.output], sources.union(made), outer)
    _check_bodies(path, graph.node, sources.union(outer))


def _check_bodies(path: Path, nodes: Iterable[NodeProto], before: set[str]) -> None:
    """``before`` is what the body of the first node sees, and is added to: each node sees what those before it give.

    Recursion goes no deeper than protobuf reads bodies in bodies, which is less than a hundred.
    """
    for node in nodes:
        for body in bodies(node):
            _check_graph(path, body, before)
        before.update(filter(None, node.output))


def _check_given(path: Path, outputs: Iterable[str], given: Collection[str], outer: Collection[str]) -> None:
    for name in outputs:
        if name and name not in given and name in outer:
            raise ConversionError(
                f"{path}: a body gives {quoted(name)}, a value of the graph around it, which ONNX Runtime does not run;"
                " put an Identity between them"
            )
        if name not in given:
            raise SourceError(f"{path}: damaged: nothing gives the output {quoted(name)}")
