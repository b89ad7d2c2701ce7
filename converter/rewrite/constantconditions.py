"""Drops conditions that are always true, and the And that combines them: exporters write masks that hide nothing."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from converter.graph.initializers import const
from converter.graph.step import Step
from converter.graph.values import Dim, constant_integer, is_onnx_operator, known_shape, same_dim

Shape = Sequence[Dim]

_MOVED = frozenset({"Expand", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
_DEEPEST = 8  # nodes to follow upstream from a condition, or downstream with a smaller shape, at most
# Elementwise, with all inputs broadcast to one shape.
_BROADCASTS = frozenset({"Add", "And", "Cast", "Div", "Mul", "Not", "Or", "Sub", "Where", "Xor"})


class DropTruths(Step):
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


# --- conditions that are always true ----------------------------------------------------------------------------------


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
