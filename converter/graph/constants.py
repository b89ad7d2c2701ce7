"""Finds what a graph's constants tell about integer inputs: tables that they index, numbers they are compared with."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

# Operators that pass on the values of their first input.
_TRANSPARENT = frozenset(
    {"Cast", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Tile", "Transpose", "Unsqueeze"}
)


def index_bound(value: ir.Value) -> int | None:
    """Return the size of the smallest table that ``value`` indexes, directly or after it was moved, or None."""
    bounds: list[int | None] = []
    for node, position in value.uses():
        if node.domain != "":
            continue
        if node.op_type == "Gather" and position == 1:
            bounds.append(_rows(node))
        elif node.op_type in _TRANSPARENT and position == 0:
            bounds.append(index_bound(node.outputs[0]))
    found = [bound for bound in bounds if bound]
    return min(found) if found else None


def _rows(gather: ir.Node) -> int | None:
    """Return the number of entries in the table of a Gather; None if unknown, or if the table has no such axis."""
    table = gather.inputs[0]
    axis = gather.attributes["axis"].as_int() if "axis" in gather.attributes else 0
    if table is None or table.shape is None or not -len(table.shape) <= axis < len(table.shape):
        return None
    size = table.shape[axis]
    return size if isinstance(size, int) else None


def compared_with(value: ir.Value) -> tuple[int, ...]:
    """Return the integers that ``value`` is compared with for equality, sorted: a sample rate, a mode; () for none."""
    return tuple(sorted(set(_compared_integers(value))))


def _compared_integers(value: ir.Value) -> Iterator[int]:
    for node, position in value.uses():
        if node.domain == "" and node.op_type == "Equal":
            yield from _number(node.inputs[1 - position])
        elif node.op_type in _TRANSPARENT and position == 0:
            yield from _compared_integers(node.outputs[0])


def _number(value: ir.Value | None) -> Iterator[int]:
    """Yield ``value`` if it is one constant integer, in an initializer or a Constant node."""
    if value is None or value.dtype not in (None, ir.DataType.INT64, ir.DataType.INT32, ir.DataType.UINT8):
        return
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is not None and tensor.size == 1 and tensor.dtype.is_integer():
        yield int(tensor.numpy().reshape(()))
