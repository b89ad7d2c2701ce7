"""Finds RMS normalisation that exporters wrote out: scale · x / √(mean of x² + epsilon), by rows."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from converter.graph.initializers import const, const_dims
from converter.graph.values import constant_number, known_shape, only_reader

FLOAT = ir.DataType.FLOAT


@dataclass(frozen=True, slots=True)
class RootMeanSquare:
    """The ``nodes``, in order, from the square of ``x`` to the product with ``scale``, an initializer of one row."""

    nodes: tuple[ir.Node, ...]
    x: ir.Value
    scale: ir.Value
    epsilon: float


def root_mean_square(mean: ir.Node) -> RootMeanSquare | None:
    """Match the normalisation that the ReduceMean ``mean`` is part of; None if the nodes compute anything else."""
    square = _square(mean)
    x = None if square is None else square.inputs[0]
    shape = known_shape(x)
    if square is None or x is None or x.dtype != FLOAT or not shape or not _over_last_axis(mean, len(shape)):
        return None
    added = only_reader(mean.outputs[0])
    epsilon = None if added is None or added.op_type != "Add" else _other_operand(added, mean.outputs[0], len(shape))
    if added is None or epsilon is None or not 0 <= epsilon < float("inf"):
        return None
    divided = _divided(x, added.outputs[0], len(shape))
    scaled = None if divided is None else only_reader(divided[-1].outputs[0])
    if divided is None or scaled is None or scaled.op_type != "Mul":
        return None
    (scale,) = [value for value in scaled.inputs if value is not divided[-1].outputs[0]] or [None]
    if scale is None or scale.dtype != FLOAT or const_dims(scale) != (shape[-1],):
        return None
    return RootMeanSquare((square, mean, added, *divided, scaled), x, scale, epsilon)


def _square(mean: ir.Node) -> ir.Node | None:
    """Return the node that squares a value, if ``mean`` is a ReduceMean and alone reads the square."""
    value = mean.inputs[0] if mean.op_type == "ReduceMean" else None
    node = None if value is None else value.producer()
    if value is None or node is None or only_reader(value) is not mean or node.domain != "":
        return None
    if node.op_type == "Pow":
        return node if constant_number(node.inputs[1], rank=0) == 2 else None
    return node if node.op_type == "Mul" and node.inputs[0] is node.inputs[1] else None


def _over_last_axis(mean: ir.Node, rank: int) -> bool:
    """Whether ``mean`` is taken over the last of ``rank`` dimensions, which stays with size 1."""
    keep, axes_attribute = mean.attributes.get("keepdims"), mean.attributes.get("axes")
    axes_tensor = const(mean.inputs[1]) if len(mean.inputs) > 1 else None
    axes = [] if axes_attribute is None else list(axes_attribute.as_ints())
    if axes_tensor is not None:
        axes = [int(axis) for axis in axes_tensor.numpy().reshape(-1)]
    return axes in ([-1], [rank - 1]) and (keep is None or keep.as_int() == 1)


def _divided(x: ir.Value, shifted: ir.Value, rank: int) -> tuple[ir.Node, ...] | None:
    """Return the nodes, in order, that divide ``x`` by the root of ``shifted`` or multiply it by the reciprocal."""
    root = only_reader(shifted)
    if root is None:
        return None
    power = constant_number(root.inputs[1], rank=0) if root.op_type == "Pow" and root.inputs[0] is shifted else None
    if root.op_type != "Sqrt" and power not in (0.5, -0.5):
        return None
    nodes, inverse = [root], power == -0.5
    last = only_reader(root.outputs[0])
    if last is not None and not inverse and _reciprocal(last, root.outputs[0], rank):
        nodes.append(last)
        last, inverse = only_reader(last.outputs[0]), True
    factor = nodes[-1].outputs[0]
    if last is None or last.op_type != ("Mul" if inverse else "Div"):
        return None
    operands = list(last.inputs)
    return (*nodes, last) if operands == [x, factor] or (inverse and operands == [factor, x]) else None


def _reciprocal(node: ir.Node, value: ir.Value, rank: int) -> bool:
    """Whether ``node`` computes 1 / ``value``."""
    if node.op_type == "Div":
        return node.inputs[1] is value and constant_number(node.inputs[0], rank=rank) == 1
    return node.op_type == "Reciprocal"


def _other_operand(node: ir.Node, value: ir.Value, rank: int) -> float | None:
    """Return the constant number that is the other operand of ``node``, beside ``value``."""
    return constant_number(node.inputs[1] if node.inputs[0] is value else node.inputs[0], rank=rank)
