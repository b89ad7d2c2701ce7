"""Finds what a graph's constants tell about integer inputs: tables that they index, numbers they are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

# Operators that pass on the values of their first input.
_TRANSPARENT = frozenset(
    {
        *("Cast", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Tile", "Transpose", "Unsqueeze"),
        *("Gather", "GatherElements", "GatherND", "Split"),
    }
)
# Operators that pick entries along an axis of their first input by the indices in another; the number is its position.
_INDEXED = {"Gather": 1, "GatherElements": 1, "ScatterElements": 1, "GatherND": 1, "ScatterND": 1}

Rows = int | str


def index_bounds(value: ir.Value) -> frozenset[Rows]:
    """Return the sizes of all tables that ``value`` indexes, directly or after it was moved or a constant was added.

    The size of a table that is computed is the name of its dimension.
    """
    found: set[Rows] = set()
    for node, position, offset in _readers(value):
        for rows in _tables(node) if _INDEXED.get(node.op_type) == position else ():
            if isinstance(rows, int) and rows > offset:
                found.add(rows - offset)
            elif isinstance(rows, str) and offset == 0:
                found.add(rows)
    return frozenset(found)


def compared_with(value: ir.Value) -> tuple[int, ...]:
    """Return the integers that ``value`` is compared with for equality, sorted: a sample rate, a mode; () for none."""
    found = set()
    for node, position, offset in _readers(value):
        if node.op_type == "Equal":
            numbers = _integers(node.inputs[1 - position])
            found |= {int(numbers.item()) - offset} if numbers is not None and numbers.size == 1 else set()
    return tuple(sorted(found))


def _readers(value: ir.Value) -> Iterator[tuple[ir.Node, int, int]]:
    """Yield every node that reads ``value`` plus a constant, with the position among its inputs and that constant."""
    seen, left = set(), [(value, 0)]
    while left:
        current, offset = left.pop()
        if (current, offset) in seen:
            continue
        seen.add((current, offset))
        for node, position in current.uses():
            if node.domain != "":
                continue
            yield node, position, offset
            if (node.op_type in _TRANSPARENT and position == 0) or (node.op_type == "Where" and position > 0):
                left += [(output, offset) for output in node.outputs]
            elif node.op_type == "Concat":
                left.append((node.outputs[0], offset))
            elif node.op_type in ("Add", "Sub"):
                numbers = _integers(node.inputs[1 - position])
                if numbers is not None and (node.op_type == "Add" or position == 0):
                    added = int(numbers.max())  # the offsets of several tables in one differ
                    left.append((node.outputs[0], offset + (added if node.op_type == "Add" else -added)))


def _tables(node: ir.Node) -> Iterator[Rows]:
    """Yield the number of entries along each axis that ``node`` picks from, if known and if its input has the axis."""
    table, indices = node.inputs[:2]
    if table is None or table.shape is None:
        return
    axes = [node.attributes["axis"].as_int() if "axis" in node.attributes else 0]
    if node.op_type.endswith("ND"):  # each index is a row of coordinates
        columns = indices.shape[-1] if indices is not None and indices.shape else 1
        axes = list(range(columns)) if isinstance(columns, int) else axes
    for axis in axes:
        if -len(table.shape) <= axis < len(table.shape):
            size = table.shape[axis]
            rows = size if isinstance(size, int) else size.value
            if rows is not None:
                yield rows


def _integers(value: ir.Value | None) -> NDArray[Any] | None:
    """Return the integers that an initializer or a Constant node holds, at least one; None for other values."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return tensor.numpy() if tensor is not None and tensor.size and tensor.dtype.is_integer() else None
