"""The queries, keys and values of an attention: heads split from rows, repeated for groups, or as given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from converter.graph.values import Dim, constant_number, is_onnx_operator, known_shape, same_dim

_RANK = 4  # of a constant that scales heads


@dataclass(frozen=True, slots=True)
class Operand:
    """An operand ``scale`` · ``value``: [batch, heads, rows, columns], or in rows [batch, rows, heads · columns].

    Each head serves ``shared`` neighbouring heads of the queries.
    """

    value: ir.Value
    in_rows: bool
    batch: Dim
    heads: int
    rows: Dim
    columns: int
    scale: float = 1.0
    shared: int = 1

    @classmethod
    def of(cls, value: ir.Value | None, *, scaled: bool = True) -> Operand | None:
        """Trace ``value`` [batch, heads, rows, columns] back through moves and, if ``scaled``, factors; or return
        None."""
        value, scale = _unscaled(value) if scaled else (value, 1.0)
        shape = known_shape(value)
        if value is None or shape is None or len(shape) != 4:
            return None
        batch, heads, rows, columns = shape
        if not isinstance(heads, int) or not isinstance(columns, int) or 0 in (heads, columns):
            return None
        found = cls(value, False, batch, heads, rows, columns, scale)
        view = _before_transpose(value, [0, 2, 1, 3])
        return found if view is None else found.in_rows_of(view, scaled=scaled) or found

    def in_rows_of(self, view: ir.Value, *, scaled: bool = True) -> Operand | None:
        """Return this operand, read from the rows that ``view`` [batch, rows, heads, columns] splits into heads;
        or None."""
        producer = view.producer()
        if producer is None or producer.op_type != "Reshape" or not is_onnx_operator(producer):
            return None
        rows, scale = _unscaled(producer.inputs[0]) if scaled else (producer.inputs[0], 1.0)
        shape = known_shape(rows)
        if rows is None or shape is None or len(shape) != 3 or shape[2] != self.heads * self.columns:
            return None
        if not same_dim(shape[0], self.batch) or not same_dim(shape[1], self.rows):
            return None
        return replace(self, value=rows, in_rows=True, scale=self.scale * scale)

    def ungrouped(self, *, scaled: bool = True) -> Operand:
        """Return this operand without the Unsqueeze or Reshape, Expand and Reshape that repeat each head for a
        group."""
        merged = _producer(self.value, "Reshape")
        repeated = None if merged is None else _producer(merged.inputs[0], "Expand")
        unsqueezed = None if repeated is None else repeated.inputs[0]
        unsqueeze = _producer(unsqueezed, "Unsqueeze") or _producer(unsqueezed, "Reshape")
        source = None if unsqueeze is None else unsqueeze.inputs[0]
        wide, shape = (None if repeated is None else known_shape(repeated.outputs[0])), known_shape(source)
        if self.in_rows or wide is None or shape is None or len(wide) != 5 or len(shape) != 4:
            return self
        single = known_shape(unsqueezed)
        heads, shared = shape[1], wide[2]
        if not isinstance(heads, int) or not isinstance(shared, int) or heads * shared != self.heads:
            return self
        fits = (
            single is not None and len(single) == 5 and single[2] == 1 and wide[1] == heads and wide[4] == self.columns
        )
        if not fits or not (same_dim(wide[0], shape[0]) and same_dim(wide[3], shape[2]) and shape[3] == self.columns):
            return self
        found = Operand.of(source, scaled=scaled)
        return self if found is None else replace(found, scale=self.scale * found.scale, shared=shared)


def columns_first(value: ir.Value | None) -> Operand | None:
    """Return the operand whose transpose [batch, heads, columns, rows] is ``value``."""
    value, scale = _unscaled(value)
    transposed = _before_transpose(value, [0, 1, 3, 2])
    if transposed is not None:
        found = Operand.of(transposed)
        return None if found is None else replace(found, scale=scale * found.scale)
    view, shape = _before_transpose(value, [0, 2, 3, 1]), known_shape(value)
    if value is None or view is None or shape is None:
        return None
    batch, heads, columns, rows = shape
    if not isinstance(heads, int) or not isinstance(columns, int) or 0 in (heads, columns):
        return None
    return Operand(view, False, batch, heads, rows, columns, scale).in_rows_of(view)


def _producer(value: ir.Value | None, op: str) -> ir.Node | None:
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == op and is_onnx_operator(node) else None


def _before_transpose(value: ir.Value | None, order: Sequence[int]) -> ir.Value | None:
    """Return the input of the Transpose in this ``order`` that made ``value``, or None."""
    node = _producer(value, "Transpose")
    perm = None if node is None else node.attributes.get("perm")
    return node.inputs[0] if node is not None and perm is not None and list(perm.as_ints()) == list(order) else None


def _unscaled(value: ir.Value | None) -> tuple[ir.Value | None, float]:
    """Return the value that ``value`` is a multiple of, and the factor, which may be the left or right operand."""
    scale = 1.0
    while value is not None:
        node = _producer(value, "Mul") or _producer(value, "Div")
        if node is None:
            break
        left, right = node.inputs[0], node.inputs[1]
        factor = constant_number(right, rank=_RANK)
        if factor is None and node.op_type == "Mul":
            left, factor = right, constant_number(left, rank=_RANK)
        shape, source = known_shape(value), known_shape(left)
        if not factor or shape is None or source is None or len(shape) != len(source):
            break
        scale *= factor if node.op_type == "Mul" else 1 / factor
        value = left
    return value, scale
