"""Simplifies masks that exporters write and that hide nothing: conditions that always hold, look-ups of all rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from converter.graph.initializers import (
    Dim,
    const,
    constant_integer,
    initializer,
    is_onnx_operator,
    known_shape,
    same_dim,
)
from converter.graph.names import FreshNames, all_value_names, replace_output
from converter.graph.step import Step

Shape = Sequence[Dim]

_AXES_ARE_AN_INPUT = 13  # from this opset on, the axes of Unsqueeze are an input
_MOVED = frozenset({"Expand", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
_DEEPEST = 8  # nodes to follow upstream from a condition or a look-up, or downstream with a smaller shape, at most
# Elementwise, with all inputs broadcast to one shape.
_BROADCASTS = frozenset({"Add", "And", "Cast", "Div", "Mul", "Not", "Or", "Sub", "Where", "Xor"})


class DropConstantConditions(Step):
    """Replace And by one of its operands if the other is always true.

    The result may then have a smaller shape. That is right if every reader of it, or of values computed elementwise
    from it, broadcasts it to the shape it would have had.

    Requires: types and shapes are known.
    """

    name = "drop conditions that always hold"

    def apply(self, model: ir.Model) -> bool:
        modified = False
        for node in [each for each in model.graph if each.op_type == "And" and is_onnx_operator(each)]:
            modified = _drop(model.graph, node) or modified
        return modified


def _drop(graph: ir.Graph, node: ir.Node) -> bool:
    output = node.outputs[0]
    for truth, kept in ((node.inputs[0], node.inputs[1]), (node.inputs[1], node.inputs[0])):
        shape = known_shape(kept)
        if kept is None or shape is None or output.is_graph_output() or not _always_true(truth):
            continue
        smaller = _new_shapes(output, shape)
        if smaller is not None:
            for value, dims in smaller.items():
                value.shape = ir.Shape(dims)
            output.replace_all_uses_with(kept)
            graph.remove(node, safe=True)
            return True
    return False


def _new_shapes(value: ir.Value, shape: Shape, depth: int = _DEEPEST) -> dict[ir.Value, Shape] | None:
    """Return the new shapes of ``value``, which now has ``shape``, and of the values computed from it.

    None if the change reaches an output of the graph, or a node that is not known to broadcast it to the previous
    shape.
    """
    if _same(shape, known_shape(value)):
        return {}
    if value.is_graph_output() or depth == 0:
        return None
    found = {value: shape}
    for node, _ in value.uses():
        if node.op_type not in _BROADCASTS or not is_onnx_operator(node) or node.graph is not value.graph:
            return None
        given = _broadcast([shape if read is value else known_shape(read) for read in node.inputs])
        further = None if given is None else _new_shapes(node.outputs[0], given, depth - 1)
        if further is None:
            return None
        found |= further
    return found


def _same(a: Shape, b: Shape | None) -> bool:
    return b is not None and len(a) == len(b) and all(map(same_dim, a, b))


def _broadcast(shapes: Sequence[Shape | None]) -> Shape | None:
    """Return the shape to which values of ``shapes`` broadcast together; None if it is not known."""
    found: list[Dim] = []
    for shape in shapes:
        if shape is None:
            return None
        found[:0] = [1] * (len(shape) - len(found))
        for axis, size in enumerate(shape, len(found) - len(shape)):
            if found[axis] == 1:
                found[axis] = size
            elif size != 1 and not same_dim(size, found[axis]):
                return None
    return found


def _always_true(value: ir.Value | None, depth: int = _DEEPEST) -> bool:
    """Whether every element of ``value`` is true, whatever the graph is fed."""
    tensor = const(value)
    if tensor is not None:
        return bool(tensor.numpy().all())
    node = None if value is None else value.producer()
    if node is None or not is_onnx_operator(node) or depth == 0:
        return False
    if node.op_type in _MOVED:
        return _always_true(node.inputs[0], depth - 1)
    if node.op_type == "And":
        return all(_always_true(operand, depth - 1) for operand in node.inputs)
    if node.op_type not in ("GreaterOrEqual", "LessOrEqual"):
        return False
    greater, less = node.inputs if node.op_type == "GreaterOrEqual" else reversed(node.inputs)
    least, bound = _lower_bound(greater), const(less)
    return least is not None and bound is not None and bool((bound.numpy() <= least).all())


def _lower_bound(value: ir.Value | None, depth: int = _DEEPEST) -> int | None:
    """Return a lower bound of the elements of ``value``: the start of a range of integers; None if not known."""
    node = None if value is None else value.producer()
    if node is None or not is_onnx_operator(node) or depth == 0:
        return None
    if node.op_type in _MOVED:
        return _lower_bound(node.inputs[0], depth - 1)
    if node.op_type != "Range":
        return None
    start, step = constant_integer(node.inputs[0]), constant_integer(node.inputs[2])
    return start if step is not None and step > 0 else None


class GatherAllToUnsqueeze(Step):
    """Rewrite GatherND as Unsqueeze if its indices are whole ranges in order: for example data[i, j] at [i, 1, j].

    The shapes tell that the ranges are as long as the data: dimensions of one name have one size. The node keeps its
    name. The nodes that made the indices become unused, unless others read them.

    Requires: types and shapes are known.
    """

    name = "rewrite look-ups of all rows as Unsqueeze"

    def apply(self, model: ir.Model) -> bool:
        if model.opset_imports[""] < _AXES_ARE_AN_INPUT:
            return False
        graph, fresh, found = model.graph, FreshNames(all_value_names(model)), False
        for node in [each for each in graph if each.op_type == "GatherND" and is_onnx_operator(each)]:
            axes = _added_axes(node)
            if axes is not None:
                name = fresh.make(f"{node.name}/axes")
                axes_value = initializer(graph, name, ir.tensor(axes, dtype=ir.DataType.INT64, name=name))
                unsqueeze = ir.node("Unsqueeze", [node.inputs[0], axes_value], name=node.name)
                output, old_output = unsqueeze.outputs[0], node.outputs[0]
                output.type, output.shape = old_output.type, old_output.shape
                graph.insert_before(node, unsqueeze)
                replace_output(node, output)
                found = True
        return found


def _added_axes(node: ir.Node) -> list[int] | None:
    """Return the axes of size 1 that the node adds to its data; None if the node does anything else."""
    data, indices = node.inputs[0], node.inputs[1]
    if data is None or data.shape is None or indices is None or node.attributes.get_int("batch_dims", 0) != 0:
        return None
    found = _coordinates(indices)
    shape = node.outputs[0].shape
    if found is None or shape is None or len(found) > len(data.shape):
        return None
    axes = [each.axis for each in found]
    rank = len(shape) - (len(data.shape) - len(found))
    if axes != sorted(set(axes)) or any(not same_dim(e.size, d) for e, d in zip(found, data.shape, strict=False)):
        return None
    added = [axis for axis in range(rank) if axis not in axes]
    return added if all(shape[axis] == 1 for axis in added) else None


@dataclass(frozen=True, slots=True)
class _Coordinate:
    """A value of ``rank`` dimensions whose every element is its own coordinate along ``axis``, which has ``size``."""

    axis: int
    size: Dim
    rank: int


def _coordinates(indices: ir.Value) -> list[_Coordinate] | None:
    """Return the coordinates that ``indices`` hold along their last axis, or None."""
    joined = indices.producer()
    if joined is None or joined.op_type != "Concat" or not is_onnx_operator(joined) or indices.shape is None:
        return None
    last = len(indices.shape) - 1
    if joined.attributes["axis"].as_int() not in (-1, last):
        return None
    found = []
    for part in joined.inputs:
        each = _coordinate(part)
        if part is None or part.shape is None or each is None or each.axis == last or part.shape[last] != 1:
            return None
        found.append(each)
    return found


def _coordinate(value: ir.Value | None, depth: int = _DEEPEST) -> _Coordinate | None:
    node = None if value is None else value.producer()
    if value is None or value.shape is None or node is None or not is_onnx_operator(node) or depth == 0:
        return None
    if node.op_type == "Range":
        is_full_range = constant_integer(node.inputs[0]) == 0 and constant_integer(node.inputs[2]) == 1
        return _Coordinate(0, value.shape[0], 1) if is_full_range and len(value.shape) == 1 else None
    if node.op_type not in ("Unsqueeze", "Expand"):
        return None
    found = _coordinate(node.inputs[0], depth - 1)
    if found is None:
        return None
    rank = len(value.shape)
    if node.op_type == "Expand":  # dimensions are added in front
        axis = found.axis + rank - found.rank
        return _Coordinate(axis, found.size, rank) if same_dim(value.shape[axis], found.size) else None
    axes_tensor = const(node.inputs[1])
    if axes_tensor is None:
        return None
    added = {int(axis) % rank for axis in axes_tensor.numpy().reshape(-1)}
    kept = [axis for axis in range(rank) if axis not in added]
    return _Coordinate(kept[found.axis], found.size, rank)
