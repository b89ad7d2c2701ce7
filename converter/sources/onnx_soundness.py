"""Whether an ONNX file holds what it says it holds: every tensor as long as its shape, every value given once.

Libraries below read tensors when they are first used and trust what the file says of them, so that a lie would come out
late, as an error about something else, or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper

from bf16kit.errors import ConversionError, SourceError

_LARGEST = 2**47  # bytes of one tensor: more than any machine maps
_SHOWN = 60  # characters of a name that a stranger chose
_ENDLESS = 10**9  # turns of a Loop, from which on nobody waits for its end
_MOST = 2**36  # elements of a value of constant shape
_SHAPES = {"ConstantOfShape": 0, "Expand": 1}  # which input says the shape of the result
_LONGEST_RANGE = 2**24  # numbers of a constant Range: shape inference counts through all of them

# Elements that share a byte, by dtype; those of 6 bits are packed in more ways than one, and not counted.
_PER_BYTE = {
    TensorProto.UINT4: 2,
    TensorProto.INT4: 2,
    TensorProto.FLOAT4E2M1: 2,
    **{number: 4 for name, number in TensorProto.DataType.items() if name in ("UINT2", "INT2")},
}
_UNCOUNTED = {number for name, number in TensorProto.DataType.items() if name.startswith("FLOAT6")}
# Two entries of their field each.
_COMPLEX = (TensorProto.COMPLEX64, TensorProto.COMPLEX128)


def check(path: Path, model: ModelProto) -> None:
    """Raise :class:`SourceError` naming the tensor, value or attribute that is not as ``model`` says, and
    :class:`ConversionError` for a Loop that never ends."""
    anywhere = {name for node in _nodes(model) for name in node.output}
    for graph in _graphs(model):
        _check_names(path, graph)
        _check_outputs(path, graph, anywhere if graph is not model.graph else set())
        for tensor in graph.initializer:
            _check_tensor(path, tensor)
    opsets = {"" if entry.domain == "ai.onnx" else entry.domain: entry.version for entry in model.opset_import}
    for node in _nodes(model):
        if any(isinstance(name, bytes) for name in (node.name, node.op_type, node.domain, *node.input, *node.output)):
            raise SourceError(f"{path}: damaged: node {node.name!r} has names that are not UTF-8")
        names = [attribute.name for attribute in node.attribute]
        if len(set(names)) < len(names):
            raise SourceError(f"{path}: damaged: node {_quoted(node.name)} has two attributes of one name")
        for attribute in node.attribute:
            _check_attribute(path, node, attribute, opsets)
    for graph in _graphs(model):
        constants = _constants(graph)
        for node in graph.node:
            _check_end(path, node, constants)


def _graphs(model: ModelProto) -> Iterator[GraphProto]:
    """The main graph, and every body in it and in functions."""
    todo = [model.graph]
    todo += [graph for function in model.functions for node in function.node for graph in _bodies(node)]
    while todo:
        graph = todo.pop()
        yield graph
        todo += [body for node in graph.node for body in _bodies(node)]


def _bodies(node: NodeProto) -> Iterator[GraphProto]:
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def _nodes(model: ModelProto) -> Iterator[NodeProto]:
    for function in model.functions:
        yield from function.node
    for graph in _graphs(model):
        yield from graph.node


def _check_names(path: Path, graph: GraphProto) -> None:
    """Each value is given once, by an input, an initializer or a node; up to IR version 3 inputs name initializers."""
    initializers = [tensor.name for tensor in graph.initializer]
    inputs = [value.name for value in graph.input]
    made = [name for node in graph.node for name in node.output if name]
    given = [*set(inputs).union(initializers), *made]
    for names in (initializers, inputs, given):
        seen: set[str] = set()
        for name in names:
            if name in seen:
                raise SourceError(f"{path}: damaged: {_quoted(name)} is given twice")
            seen.add(name)
    if any(isinstance(name, bytes) for name in (*inputs, *initializers, *(value.name for value in graph.output))):
        raise SourceError(f"{path}: damaged: an input, output or initializer has a name that is not UTF-8")
    if "" in (*inputs, *initializers):
        raise SourceError(f"{path}: damaged: an input or an initializer of graph {_quoted(graph.name)} has no name")


def _check_outputs(path: Path, graph: GraphProto, outer: Collection[str]) -> None:
    """Each output is given by the graph itself, or, for a body, by one of those around it."""
    given = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    given |= {name for node in graph.node for name in node.output}
    for value in graph.output:
        if value.name not in given and value.name not in outer:
            raise SourceError(f"{path}: damaged: nothing gives the output {_quoted(value.name)}")


def _check_tensor(path: Path, tensor: TensorProto) -> None:
    known = tensor.data_type in helper.get_all_tensor_dtypes()
    if not known or tensor.data_type == TensorProto.UNDEFINED:
        raise SourceError(f"{path}: damaged: tensor {_quoted(tensor.name)} has the unknown dtype {tensor.data_type}")
    count = math.prod(tensor.dims)
    if any(dim < 0 for dim in tensor.dims) or math.prod(max(dim, 1) for dim in tensor.dims) > _LARGEST:
        raise SourceError(f"{path}: damaged: tensor {_quoted(tensor.name)} has the shape {_shape(tensor)}")
    if tensor.HasField("segment"):
        raise SourceError(f"{path}: tensor {_quoted(tensor.name)} is in segments, which nobody writes")
    if tensor.data_location == TensorProto.EXTERNAL:
        _check_external(path, tensor, _nbytes(tensor, count))
    elif tensor.data_type == TensorProto.STRING:
        _check_count(path, tensor, count, len(tensor.string_data), "strings")
    elif tensor.data_type in _UNCOUNTED:
        return
    elif tensor.HasField("raw_data"):
        _check_count(path, tensor, _nbytes(tensor, count), len(tensor.raw_data), "bytes")
    else:
        field = helper.tensor_dtype_to_field(tensor.data_type)
        per_entry = _PER_BYTE.get(tensor.data_type, 1)
        entries = 2 * count if tensor.data_type in _COMPLEX else -(-count // per_entry)
        _check_count(path, tensor, entries, len(getattr(tensor, field)), "numbers")


def _nbytes(tensor: TensorProto, count: int) -> int:
    per_byte = _PER_BYTE.get(tensor.data_type)
    if per_byte is not None:
        return -(-count // per_byte)
    return int(count * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)


def _check_count(path: Path, tensor: TensorProto, expected: int, found: int, what: str) -> None:
    if expected != found:
        raise SourceError(
            f"{path}: damaged: tensor {_quoted(tensor.name)} of shape {_shape(tensor)} needs {expected} {what}, and the"
            f" file has {found}"
        )


def _check_external(path: Path, tensor: TensorProto, nbytes: int) -> None:
    """Where its bytes are said to be: what lies there is checked where files are looked at."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    if not entries.get("location") or "\0" in entries["location"]:
        raise SourceError(f"{path}: damaged: tensor {_quoted(tensor.name)} is in another file, and not said in which")
    if tensor.data_type == TensorProto.STRING:
        raise SourceError(f"{path}: damaged: tensor {_quoted(tensor.name)} holds strings in another file")
    for key in ("offset", "length"):
        text = entries.get(key, "0")
        if not (text.isascii() and text.isdecimal() and len(text) < 20):
            raise SourceError(f"{path}: damaged: tensor {_quoted(tensor.name)} has the {key} {_quoted(text)}")
    length = int(entries.get("length", nbytes)) or nbytes
    if length != nbytes:
        raise SourceError(
            f"{path}: damaged: tensor {_quoted(tensor.name)} of shape {_shape(tensor)} needs {nbytes} bytes, and its"
            f" entry says {length}"
        )


_VALUES = {
    AttributeProto.TENSOR: "t",
    AttributeProto.GRAPH: "g",
    AttributeProto.SPARSE_TENSOR: "sparse_tensor",
}


def _check_attribute(path: Path, node: NodeProto, attribute: AttributeProto, opsets: Mapping[str, int]) -> None:
    if attribute.type == AttributeProto.TENSOR and attribute.HasField("t"):
        _check_tensor(path, attribute.t)
    for tensor in attribute.tensors:
        _check_tensor(path, tensor)
    what = f"{path}: damaged: node {_quoted(node.name)}: attribute {_quoted(attribute.name)} of {_quoted(node.op_type)}"
    field = _VALUES.get(attribute.type)
    if field is not None and not attribute.HasField(field) and not attribute.ref_attr_name:
        raise SourceError(f"{what} is empty")
    expected = _expected_type(node, attribute.name, opsets)
    if expected is not None and attribute.type != expected:
        found, wanted = (AttributeProto.AttributeType.Name(number) for number in (attribute.type, expected))
        raise SourceError(f"{what} is {found}, and has to be {wanted}")


def _expected_type(node: NodeProto, name: str, opsets: Mapping[str, int]) -> int | None:
    """The type that ONNX gives an attribute; None where it is not ONNX's."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    try:
        schema = onnx.defs.get_schema(node.op_type, opsets.get(domain, 0), domain)
    except (onnx.defs.SchemaError, TypeError):  # not ONNX's; an opset beyond 32 bits
        return None
    attribute = schema.attributes.get(name)
    return None if attribute is None else int(attribute.type.value)  # type: ignore[attr-defined]  # an enum


def _constants(graph: GraphProto) -> Mapping[str, TensorProto]:
    """The initializers and Constant nodes of one graph, by the name of the value that they give."""
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.output and node.attribute and node.attribute[0].name == "value":
            constants[node.output[0]] = node.attribute[0].t
    return constants


def _check_end(path: Path, node: NodeProto, constants: Mapping[str, TensorProto]) -> None:
    """:class:`ConversionError` for a Loop or Range that constants make turn, or count, longer than anybody waits."""
    if node.domain not in ("", "ai.onnx") or node.op_type not in ("Range", "Loop", *_SHAPES):
        return
    numbers = [_number(constants.get(name)) for name in node.input[:3]]
    place = _SHAPES.get(node.op_type)
    if place is not None and place < len(node.input):
        shape = _shape_of(constants.get(node.input[place]))
        if math.prod(max(size, 1) for size in shape) > _MOST:
            raise ConversionError(f"{path}: {node.op_type} {_quoted(node.name)} makes a tensor of shape {shape[:6]}")
    if node.op_type == "Range" and len(numbers) == 3:
        start, limit, delta = numbers
        if start is not None and limit is not None and delta and (limit - start) // delta > _LONGEST_RANGE:
            raise ConversionError(f"{path}: Range {_quoted(node.name)} counts to {(limit - start) // delta}")
    if node.op_type == "Loop" and len(numbers) > 1 and _keeps_going(node):
        turns, condition = numbers[:2]
        bounded = bool(node.input[0]) and (turns is None or turns < _ENDLESS)
        if not bounded and (condition or not node.input[1]):
            why = f"turns {turns} times" if turns is not None else "never ends: its condition is always true"
            raise ConversionError(f"{path}: Loop {_quoted(node.name)} {why}")


def _shape_of(tensor: TensorProto | None) -> list[int]:
    """The shape that a constant says; [] where it is none."""
    if tensor is None or tensor.data_location == TensorProto.EXTERNAL or tensor.data_type != TensorProto.INT64:
        return []
    return [int(size) for size in onnx.numpy_helper.to_array(tensor).reshape(-1)]


def _number(tensor: TensorProto | None) -> float | None:
    """The value of a finite constant of one element that lies in the graph, a whole one as an int."""
    if tensor is None or tensor.data_location == TensorProto.EXTERNAL or math.prod(tensor.dims) != 1:
        return None
    value = onnx.numpy_helper.to_array(tensor).reshape(-1)[0]
    if value.dtype.kind in "iub":
        return int(value)
    return float(value) if value.dtype.kind == "f" and math.isfinite(value) else None


def _keeps_going(node: NodeProto) -> bool:
    """Whether the body of a Loop hands its condition on as it was."""
    for body in _bodies(node):
        if not body.output or len(body.input) < 2:
            return False
        makers = {name: maker for maker in body.node for name in maker.output}
        name = body.output[0].name
        while name in makers and makers[name].op_type == "Identity" and makers[name].input:
            name = makers.pop(name).input[0]
        return bool(name == body.input[1].name)
    return False


def _quoted(name: str) -> str:
    return repr(name if len(name) <= _SHOWN else f"{name[:_SHOWN]}…")


def _shape(tensor: TensorProto) -> str:
    shown = ", ".join(str(dim) for dim in tensor.dims[:6])
    return f"[{shown}{', …' if len(tensor.dims) > 6 else ''}]"
