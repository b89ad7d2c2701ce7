"""Whether what constants make a Loop turn, or a Range count, comes to an end while somebody waits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import onnx
from onnx import GraphProto, NodeProto, TensorProto

from bf16kit.errors import ConversionError
from converter.sources.onnx_soundness.walk import bodies, quoted

_ENDLESS = 10**9  # turns of a Loop, from which on nobody waits for its end
_MOST = 2**36  # elements of a value of constant shape
_SHAPES = {"ConstantOfShape": 0, "Expand": 1}  # which input says the shape of the result
_MADE = ("RandomNormal", "RandomUniform")  # an attribute says the shape of the result
_LONGEST_RANGE = 2**24  # numbers of a constant Range: shape inference counts through all of them


def check_ends(path: Path, graph: GraphProto) -> None:
    """:class:`ConversionError` for a Loop, a Range or a tensor of ``graph`` beyond what anybody waits for."""
    constants = _constants(graph)
    for node in graph.node:
        _check_end(path, node, constants)


def _constants(graph: GraphProto) -> Mapping[str, TensorProto]:
    """The initializers and Constant nodes of one graph, by the name of the value that they give."""
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.output and node.attribute and node.attribute[0].name == "value":
            constants[node.output[0]] = node.attribute[0].t
    return constants


def _check_end(path: Path, node: NodeProto, constants: Mapping[str, TensorProto]) -> None:
    """:class:`ConversionError` for a Loop or Range that constants make turn, or count, longer than anybody waits."""
    if node.domain not in ("", "ai.onnx") or node.op_type not in ("Range", "Loop", *_SHAPES, *_MADE):
        return
    numbers = [_number(constants.get(name)) for name in node.input[:3]]
    shape = _made(node, constants)
    if math.prod(max(size, 1) for size in shape) > _MOST:
        raise ConversionError(f"{path}: {node.op_type} {quoted(node.name)} makes a tensor of shape {shape[:6]}")
    if node.op_type == "Range" and len(numbers) == 3:
        start, limit, delta = numbers
        if start is not None and limit is not None and delta and (limit - start) // delta > _LONGEST_RANGE:
            raise ConversionError(f"{path}: Range {quoted(node.name)} counts to {(limit - start) // delta}")
    if node.op_type == "Loop" and len(numbers) > 1 and _keeps_going(node):
        turns, condition = numbers[:2]
        bounded = bool(node.input[0]) and (turns is None or turns < _ENDLESS)
        if not bounded and (condition or not node.input[1]):
            why = f"turns {turns} times" if turns is not None else "never ends: its condition is always true"
            raise ConversionError(f"{path}: Loop {quoted(node.name)} {why}")


def _made(node: NodeProto, constants: Mapping[str, TensorProto]) -> list[int]:
    """The shape that constants, or an attribute, say the result of ``node`` has; [] where they do not."""
    place = _SHAPES.get(node.op_type)
    if place is not None and place < len(node.input):
        return _shape_of(constants.get(node.input[place]))
    said = (attribute.ints for attribute in node.attribute if attribute.name == "shape" and node.op_type in _MADE)
    return list(next(said, []))


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
    for body in bodies(node):
        if not body.output or len(body.input) < 2:
            return False
        makers = {name: maker for maker in body.node for name in maker.output}
        name = body.output[0].name
        while name in makers and makers[name].op_type == "Identity" and makers[name].input:
            name = makers.pop(name).input[0]
        return bool(name == body.input[1].name)
    return False
