"""Checks that Loops and Ranges with constant bounds end in a reasonable time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import onnx
from onnx import GraphProto, NodeProto, TensorProto

from bf16kit.messages.errors import ConversionError
from converter.read.onnx_soundness.walk import bodies, quoted

_ENDLESS = 10**9  # iterations of a Loop that take unreasonably long
_MOST = 2**36  # elements of a value with a constant shape
_SHAPES = {"ConstantOfShape": 0, "Expand": 1}  # the input that gives the shape of the result
_SHAPED_BY_ATTRIBUTE = ("RandomNormal", "RandomUniform")  # an attribute gives the shape of the result
_LONGEST_RANGE = 2**24  # numbers of a constant Range: shape inference computes all of them


def check_ends(path: Path, graph: GraphProto) -> None:
    """Raise :class:`ConversionError` for a Loop, a Range or a tensor of ``graph`` that is unreasonably large."""
    constants = _constants(graph)
    for node in graph.node:
        _check_end(path, node, constants)


def _constants(graph: GraphProto) -> Mapping[str, TensorProto]:
    """Return the initializers and Constant nodes of one graph, by the name of their value."""
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.output and node.attribute and node.attribute[0].name == "value":
            constants[node.output[0]] = node.attribute[0].t
    return constants


def _check_end(path: Path, node: NodeProto, constants: Mapping[str, TensorProto]) -> None:
    """Raise :class:`ConversionError` if constants make the node run, or its result grow, beyond the limits."""
    if node.domain not in ("", "ai.onnx") or node.op_type not in ("Range", "Loop", *_SHAPES, *_SHAPED_BY_ATTRIBUTE):
        return
    numbers = [_number(constants.get(name)) for name in node.input[:3]]
    shape = _result_shape(node, constants)
    if math.prod(max(size, 1) for size in shape) > _MOST:
        raise ConversionError(f"{path}: {node.op_type} {quoted(node.name)} makes a tensor of shape {shape[:6]}")
    if node.op_type == "Range" and len(numbers) == 3:
        start, limit, delta = numbers
        if start is not None and limit is not None and delta and (limit - start) // delta > _LONGEST_RANGE:
            raise ConversionError(f"{path}: Range {quoted(node.name)} counts to {(limit - start) // delta}")
    if node.op_type == "Loop" and len(numbers) > 1 and _keeps_going(node):
        iterations, condition = numbers[:2]
        bounded = bool(node.input[0]) and (iterations is None or iterations < _ENDLESS)
        if not bounded and (condition or not node.input[1]):
            problem = (
                f"runs {iterations} times" if iterations is not None else "never ends: its condition is always true"
            )
            raise ConversionError(f"{path}: Loop {quoted(node.name)} {problem}")


def _result_shape(node: NodeProto, constants: Mapping[str, TensorProto]) -> list[int]:
    """Return the shape of the result of ``node`` if constants or an attribute give it; else []."""
    place = _SHAPES.get(node.op_type)
    if place is not None and place < len(node.input):
        return _shape_of(constants.get(node.input[place]))
    shapes = (
        attribute.ints
        for attribute in node.attribute
        if attribute.name == "shape" and node.op_type in _SHAPED_BY_ATTRIBUTE
    )
    return list(next(shapes, []))


def _shape_of(tensor: TensorProto | None) -> list[int]:
    """Return the shape that a constant holds; [] if ``tensor`` is None or not such a constant."""
    if tensor is None or tensor.data_location == TensorProto.EXTERNAL or tensor.data_type != TensorProto.INT64:
        return []
    return [int(size) for size in onnx.numpy_helper.to_array(tensor).reshape(-1)]


def _number(tensor: TensorProto | None) -> float | None:
    """Return a finite constant of one element that is stored in the graph, an integer as int; else None."""
    if tensor is None or tensor.data_location == TensorProto.EXTERNAL or math.prod(tensor.dims) != 1:
        return None
    value = onnx.numpy_helper.to_array(tensor).reshape(-1)[0]
    if value.dtype.kind in "iub":
        return int(value)
    return float(value) if value.dtype.kind == "f" and math.isfinite(value) else None


def _keeps_going(node: NodeProto) -> bool:
    """Return whether the body of a Loop returns its condition unchanged."""
    for body in bodies(node):
        if not body.output or len(body.input) < 2:
            return False
        makers = {name: maker for maker in body.node for name in maker.output}
        name = body.output[0].name
        while name in makers and makers[name].op_type == "Identity" and makers[name].input:
            name = makers.pop(name).input[0]
        return bool(name == body.input[1].name)
    return False
