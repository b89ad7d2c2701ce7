"""Finds attention in a graph by what it computes: softmax(scale · Q·Kᵀ + mask)·V for each head.

Exporters write it in many ways. Scores are traced from a Softmax back to a product of two computed values. Additions,
selections and factors may lie between, in any order that amounts to one scale and one added mask. If Reshape and
Transpose split rows into heads, the rows are read directly. Keys and values may be repeated for groups of heads.
Whatever does not match is left alone, also if shapes are not known to match.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from bf16kit.converter.graph.initializers import (
    Dim,
    const,
    constant_number,
    is_onnx_operator,
    known_shape,
    only_reader,
    same_dim,
    same_dims,
)

FLOAT = ir.DataType.FLOAT
_HIDDEN = -1e30  # no score changes this number when added to it
_RANK = 4  # of scores, and of a constant that scales them
_LONGEST = 8  # nodes between a product and its Softmax, at most


@dataclass(frozen=True, slots=True)
class SelectionMask:
    """A mask that selects: ``number`` replaces a score, which then has no weight, where ``condition`` is ``hides``."""

    condition: ir.Value
    hides: bool
    number: float


Mask = ir.Value | SelectionMask


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention as ``nodes``, in order, from the product of queries and keys to the Reshape that merges the heads.

    If that Reshape stays, the nodes end at the Transpose before it. ``masks`` are applied to the scaled scores in this
    order. The Softmax is among the nodes; ``values`` is the product with the values.
    """

    q: Operand
    k: Operand
    v: Operand
    scale: float
    masks: tuple[Mask, ...]
    values: ir.Node
    nodes: tuple[ir.Node, ...]

    @property
    def shape(self) -> tuple[Dim, Dim, int]:
        """The shape of the result, with the heads merged into rows: [batch, queries, heads · width]."""
        return self.q.batch, self.q.rows, self.q.heads * self.v.columns


def attention(softmax: ir.Node) -> Attention | None:
    """Return the attention that the Softmax ``softmax`` is part of. Requires: types and shapes are known."""
    if softmax.op_type != "Softmax" or not is_onnx_operator(softmax):
        return None
    scores, weights = softmax.inputs[0], softmax.outputs[0]
    if scores is None or scores.dtype != FLOAT or softmax.attributes.get_int("axis", -1) not in (-1, 3):
        return None
    traced, merged = _trace(scores), _merged(weights)
    if traced is None or merged is None:
        return None
    product, values = traced.product, merged[0]
    q, v = Operand.of(product.inputs[0]), Operand.of(values.inputs[1])
    k = Operand.of(product.inputs[1], columns_first=True)
    if q is None or k is None or v is None:
        return None
    k, v = k.ungrouped(), v.ungrouped()
    nodes = (*reversed(traced.nodes), softmax, *merged)
    found = Attention(q, k, v, traced.scale * q.scale * k.scale, traced.masks, values, nodes)
    return _trim_merge(found) if _fits(found) else None


def _fits(found: Attention) -> bool:
    q, k, v = found.q, found.k, found.v
    if not (same_dim(q.batch, k.batch) and same_dim(k.batch, v.batch) and same_dim(k.rows, v.rows)) or v.scale != 1:
        return False
    if q.columns != k.columns or k.heads != v.heads or k.shared != v.shared:
        return False
    return q.heads == k.heads * k.shared or (k.heads, k.shared) == (1, 1)


def _trim_merge(found: Attention) -> Attention | None:
    """Return the attention up to the Reshape that merges the heads into rows.

    If the Reshape does something else, the attention ends before it, and the Reshape reads merged heads. None if the
    Reshape might then give another result.
    """
    merged = found.nodes[-1]
    actual = known_shape(merged.outputs[0])
    if actual is not None and len(actual) == 3 and all(map(same_dim, actual, found.shape)):
        return found
    sizes = const(merged.inputs[1])
    if sizes is None or 0 in sizes.numpy():  # 0 copies a dimension, which merged heads would change
        return None
    return replace(found, nodes=found.nodes[:-1])


# --- from the scores back to their product ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Trace:
    """The scores as scale · product with ``masks`` applied in order; ``nodes`` compute them, the last one first."""

    product: ir.Node
    scale: float
    masks: tuple[Mask, ...]
    nodes: tuple[ir.Node, ...]


def _trace(value: ir.Value | None, depth: int = _LONGEST) -> _Trace | None:
    node = None if value is None else value.producer()
    if value is None or node is None or depth == 0 or not is_onnx_operator(node) or only_reader(value) is None:
        return None
    if node.op_type == "MatMul":
        both = all(v is not None and not v.is_initializer() for v in node.inputs)
        return _Trace(node, 1.0, (), (node,)) if both and len(known_shape(value) or ()) == _RANK else None
    for scores, step in _steps(node):
        traced = _trace(scores, depth - 1)
        if traced is None or not same_dims(value, traced.product.outputs[0]):
            continue
        if not isinstance(step, float):
            return replace(traced, masks=(*traced.masks, step), nodes=(node, *traced.nodes))
        if not traced.masks:  # a mask added before would have to be scaled as well
            return replace(traced, scale=traced.scale * step, nodes=(node, *traced.nodes))
    return None


def _steps(node: ir.Node) -> Iterator[tuple[ir.Value | None, Mask | float]]:
    """Yield how ``node`` may compute scores: the input that may be scores, with its factor or the mask added."""
    inputs: Sequence[ir.Value | None] = node.inputs
    if node.op_type == "Where":
        for scores, other, hides in ((inputs[1], inputs[2], False), (inputs[2], inputs[1], True)):
            number = constant_number(other, rank=_RANK)
            if number is not None and number <= _HIDDEN and inputs[0] is not None:
                yield scores, SelectionMask(inputs[0], hides, number)
    elif node.op_type == "Add":
        for scores, other in ((inputs[0], inputs[1]), (inputs[1], inputs[0])):
            if other is not None and other.dtype == FLOAT and other.shape is not None:
                yield scores, other
    elif (factored := _factored(node)) is not None:
        yield factored


def _factored(node: ir.Node) -> tuple[ir.Value | None, float] | None:
    """Return the input that ``node`` multiplies or divides by a constant number, and the factor; or None."""
    if node.op_type not in ("Mul", "Div") or not is_onnx_operator(node):
        return None
    left, right = node.inputs[0], node.inputs[1]
    factor = constant_number(right, rank=_RANK)
    if factor is None and node.op_type == "Mul":
        left, factor = right, constant_number(left, rank=_RANK)
    if not factor:
        return None
    return left, factor if node.op_type == "Mul" else 1 / factor


# --- from the weights to the merged heads -----------------------------------------------------------------------------


def _merged(weights: ir.Value) -> tuple[ir.Node, ir.Node, ir.Node] | None:
    """Return the product of ``weights`` and values, and the Transpose and Reshape that merge its heads."""
    product = only_reader(weights)
    if product is None or product.op_type != "MatMul" or product.inputs[0] is not weights:
        return None
    moved = only_reader(product.outputs[0])
    merged = None if moved is None or _order(moved) != [0, 2, 1, 3] else only_reader(moved.outputs[0])
    if moved is None or merged is None or merged.op_type != "Reshape" or merged.inputs[0] is not moved.outputs[0]:
        return None
    return product, moved, merged


def _order(node: ir.Node | None) -> list[int]:
    """Return the order of the Transpose ``node``; [] for other nodes, and for one that reverses the dimensions."""
    return [] if node is None or node.op_type != "Transpose" else [*node.attributes.get_ints("perm", ())]


# --- queries, keys and values -----------------------------------------------------------------------------------------


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
    def of(cls, value: ir.Value | None, *, columns_first: bool = False) -> Operand | None:
        """Trace ``value`` [batch, heads, rows, columns] back through moves and factors; or return None.

        With ``columns_first``, ``value`` is the operand's transpose [batch, heads, columns, rows].
        """
        value, scale = _unscaled(value)
        if columns_first and (transposed := _before_transpose(value, [0, 1, 3, 2])) is not None:
            found = cls.of(transposed)
            return None if found is None else replace(found, scale=scale * found.scale)
        shape = known_shape(value)
        if value is None or shape is None or len(shape) != _RANK:
            return None
        batch, heads, *last = shape
        rows, columns = reversed(last) if columns_first else last
        if not isinstance(heads, int) or not isinstance(columns, int) or 0 in (heads, columns):
            return None
        found = cls(value, False, batch, heads, rows, columns, scale)
        view = _before_transpose(value, [0, 2, 3, 1] if columns_first else [0, 2, 1, 3])
        in_rows = None if view is None else found._in_rows_of(view)
        return in_rows if columns_first else in_rows or found

    def _in_rows_of(self, view: ir.Value) -> Operand | None:
        """Return this operand read from the rows that ``view`` [batch, rows, heads, columns] splits; or None."""
        producer = _producer(view, "Reshape")
        if producer is None:
            return None
        rows, scale = _unscaled(producer.inputs[0])
        shape = known_shape(rows)
        if rows is None or shape is None or len(shape) != 3 or shape[2] != self.heads * self.columns:
            return None
        if not same_dim(shape[0], self.batch) or not same_dim(shape[1], self.rows):
            return None
        return replace(self, value=rows, in_rows=True, scale=self.scale * scale)

    def ungrouped(self) -> Operand:
        """Return this operand without the Unsqueeze or Reshape, Expand and Reshape that repeat heads for groups."""
        merged = _producer(self.value, "Reshape")
        repeated = None if merged is None else _producer(merged.inputs[0], "Expand")
        single = None if repeated is None else repeated.inputs[0]
        unsqueeze = _producer(single, "Unsqueeze") or _producer(single, "Reshape")
        if self.in_rows or repeated is None or unsqueeze is None:
            return self
        source = unsqueeze.inputs[0]
        wide, thin, shape = (known_shape(value) or () for value in (repeated.outputs[0], single, source))
        if (len(wide), len(thin), len(shape)) != (5, 5, 4):
            return self
        heads, shared = shape[1], wide[2]
        if not isinstance(heads, int) or not isinstance(shared, int) or heads * shared != self.heads:
            return self
        if thin[2] != 1 or wide[1] != heads or wide[4] != self.columns or shape[3] != self.columns:
            return self
        found = Operand.of(source) if same_dim(wide[0], shape[0]) and same_dim(wide[3], shape[2]) else None
        return self if found is None else replace(found, scale=self.scale * found.scale, shared=shared)


def _producer(value: ir.Value | None, op: str) -> ir.Node | None:
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == op and is_onnx_operator(node) else None


def _before_transpose(value: ir.Value | None, order: list[int]) -> ir.Value | None:
    """Return the input of the Transpose in this ``order`` that made ``value``, or None."""
    node = _producer(value, "Transpose")
    return node.inputs[0] if node is not None and _order(node) == order else None


def _unscaled(value: ir.Value | None) -> tuple[ir.Value | None, float]:
    """Return the value that ``value`` is a multiple of, and the factor, which may be the left or right operand."""
    scale = 1.0
    while value is not None and (node := value.producer()) is not None:
        factored = _factored(node)
        shape, source = known_shape(value), None if factored is None else known_shape(factored[0])
        if factored is None or shape is None or source is None or len(shape) != len(source):
            break
        value, scale = factored[0], scale * factored[1]
    return value, scale
