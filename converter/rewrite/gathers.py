"""Simplifies look-ups of all elements in order, which exporters write for masks: they only reshape the data."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from converter.graph.initializers import const, initializer
from converter.graph.names import FreshNames, all_value_names
from converter.graph.step import Step
from converter.graph.values import Dim, constant_integer, is_onnx_operator, same_dim
from converter.rewrite.rewriting import replace_output

_DEEPEST = 8  # nodes between a Range and the look-up, at most
_AXES_ARE_AN_INPUT = 13  # from this opset on, the axes of Unsqueeze are an input


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
                replace_output(graph, node, output)
                found = True
        return found


def _added_axes(node: ir.Node) -> list[int] | None:
    """Return the axes of size 1 that the node adds to its data; None if the node does anything else."""
    data, indices = node.inputs[0], node.inputs[1]
    batches = node.attributes.get("batch_dims")
    if data is None or data.shape is None or indices is None or (batches is not None and batches.as_int() != 0):
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
