"""Questions about nodes and values that all code asks which recognises what a graph computes."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from converter.graph.initializers import const, dims

Dim = int | ir.SymbolicDim


def is_onnx_operator(node: ir.Node) -> bool:
    """Whether ``node`` is one of ONNX's own operators."""
    return node.domain == ""


def constant_number(value: ir.Value | None, *, rank: int) -> float | None:
    """Return the number that ``value`` is: a constant of one element with at most ``rank`` dimensions; else None."""
    tensor = const(value)
    if tensor is None or tensor.size != 1 or not tensor.dtype.is_floating_point() or len(dims(tensor)) > rank:
        return None
    return float(tensor.numpy().reshape(()))


def constant_integer(value: ir.Value | None) -> int | None:
    """Return the integer that ``value`` is, a constant of one element; else None."""
    tensor = const(value)
    return None if tensor is None or tensor.size != 1 or not tensor.dtype.is_integer() else int(tensor.numpy().item())


def known_shape(value: ir.Value | None) -> Sequence[Dim] | None:
    """Return the dimensions of ``value``, if their number is known."""
    return None if value is None or value.shape is None else value.shape.dims


def same_dim(a: Dim, b: Dim) -> bool:
    """Whether two dimensions are known to be equal."""
    if isinstance(a, int) or isinstance(b, int):
        return a == b
    return a.value is not None and a.value == b.value


def same_dims(a: ir.Value, b: ir.Value) -> bool:
    """Whether two values are known to have the same shape."""
    left, right = known_shape(a), known_shape(b)
    return left is not None and right is not None and len(left) == len(right) and all(map(same_dim, left, right))


def only_reader(value: ir.Value) -> ir.Node | None:
    """Return the only reader of ``value``, if it is one of ONNX's own nodes in the same graph and reads it once."""
    uses, producer = tuple(value.uses()), value.producer()
    if len(uses) != 1 or value.is_graph_output() or producer is None:
        return None
    node = uses[0].node
    return node if is_onnx_operator(node) and node.graph is producer.graph else None
