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

from converter.fuse.heads import Operand, columns_first
from converter.graph.initializers import const
from converter.graph.values import Dim, constant_number, is_onnx_operator, known_shape, only_reader, same_dim, same_dims

FLOAT = ir.DataType.FLOAT
_HIDDEN = -1e30  # no score changes this number when added to it
_RANK = 4  # of scores
_LONGEST = 8  # nodes between a product and its Softmax, at most


@dataclass(frozen=True, slots=True)
class SelectionMask:
    """A mask that selects: where ``condition`` equals ``hides``, ``number`` replaces a score, which then has no
    weight."""

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
    def result(self) -> ir.Node:
        return self.nodes[-1]

    @property
    def shape(self) -> tuple[Dim, Dim, int]:
        """The shape of the result, with the heads merged into rows: [batch, queries, heads · width]."""
        return self.q.batch, self.q.rows, self.q.heads * self.v.columns

    @property
    def layouts(self) -> str:
        """One letter each for q, k and v: r if its heads are in rows, h if they are split."""
        return "".join("r" if each.in_rows else "h" for each in (self.q, self.k, self.v))


def attention(softmax: ir.Node) -> Attention | None:
    """Return the attention that the Softmax ``softmax`` is part of. Requires: types and shapes are known."""
    if softmax.op_type != "Softmax" or not is_onnx_operator(softmax):
        return None
    scores, weights = softmax.inputs[0], softmax.outputs[0]
    axis = softmax.attributes.get("axis")
    if scores is None or scores.dtype != FLOAT or (axis is not None and axis.as_int() not in (-1, 3)):
        return None
    traced, merged = _trace(scores), _merged(weights)
    if traced is None or merged is None:
        return None
    product, values = traced.product, merged[0]
    nodes = (*reversed(traced.nodes), softmax, *merged)
    q = Operand.of(product.inputs[0])
    transposed = columns_first(product.inputs[1])
    k = None if transposed is None else transposed.ungrouped()
    v = Operand.of(values.inputs[1], scaled=False)
    v = None if v is None else v.ungrouped(scaled=False)
    if q is None or k is None or v is None:
        return None
    found = Attention(q, k, v, traced.scale * q.scale * k.scale, traced.masks, values, nodes)
    return _trim_merge(found) if _fits(found) else None


def _fits(found: Attention) -> bool:
    q, k, v = found.q, found.k, found.v
    if not (same_dim(q.batch, k.batch) and same_dim(k.batch, v.batch) and same_dim(k.rows, v.rows)):
        return False
    if q.columns != k.columns or k.heads != v.heads or k.shared != v.shared:
        return False
    return q.heads == k.heads * k.shared or (k.heads, k.shared) == (1, 1)


def _trim_merge(found: Attention) -> Attention | None:
    """Return the attention up to the Reshape that merges the heads into rows.

    If the Reshape does something else, the attention ends before it, and the Reshape reads merged heads. None if the
    Reshape might then give another result.
    """
    merged = found.result
    actual, expected = known_shape(merged.outputs[0]), found.shape
    if actual is not None and len(actual) == 3 and all(map(same_dim, actual, expected)):
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
        shape = known_shape(value)
        both = all(v is not None and not v.is_initializer() for v in node.inputs)
        return _Trace(node, 1.0, (), (node,)) if both and shape is not None and len(shape) == 4 else None
    for scores, step in _steps(node):
        traced = _trace(scores, depth - 1)
        if traced is None or not same_dims(value, traced.product.outputs[0]):
            continue
        if isinstance(step, float):
            if not traced.masks:  # a mask added before would have to be scaled as well
                return replace(traced, scale=traced.scale * step, nodes=(node, *traced.nodes))
        else:
            return replace(traced, masks=(*traced.masks, step), nodes=(node, *traced.nodes))
    return None


def _steps(node: ir.Node) -> Iterator[tuple[ir.Value | None, Mask | float]]:
    """Yield how ``node`` may compute scores: the input that may be scores, with its factor or the mask added."""
    inputs: Sequence[ir.Value | None] = node.inputs
    if node.op_type == "Where":
        for scores, other, hides in ((inputs[1], inputs[2], False), (inputs[2], inputs[1], True)):
            number = constant_number(other, rank=_RANK)
            if number is not None and number <= _HIDDEN and inputs[0] is not None:
                yield scores, SelectionMask(inputs[0], hides, number)
    elif node.op_type == "Div":
        divisor = constant_number(inputs[1], rank=_RANK)
        if divisor:
            yield inputs[0], 1 / divisor
    elif node.op_type in ("Mul", "Add"):
        for scores, other in ((inputs[0], inputs[1]), (inputs[1], inputs[0])):
            factor = constant_number(other, rank=_RANK)
            if node.op_type == "Mul" and factor is not None:
                yield scores, factor
            elif node.op_type == "Add" and other is not None and other.dtype == FLOAT and other.shape is not None:
                yield scores, other


# --- from the weights to the merged heads -----------------------------------------------------------------------------


def _merged(weights: ir.Value) -> tuple[ir.Node, ir.Node, ir.Node] | None:
    """Return the product of ``weights`` and values, and the Transpose and Reshape that merge its heads."""
    product = only_reader(weights)
    if product is None or product.op_type != "MatMul" or product.inputs[0] is not weights:
        return None
    moved = only_reader(product.outputs[0])
    if moved is None or moved.op_type != "Transpose" or list(_order(moved)) != [0, 2, 1, 3]:
        return None
    merged = only_reader(moved.outputs[0])
    if merged is None or merged.op_type != "Reshape" or merged.inputs[0] is not moved.outputs[0]:
        return None
    return product, moved, merged


def _order(node: ir.Node) -> Sequence[int]:
    order = node.attributes.get("perm")
    return () if order is None else order.as_ints()
