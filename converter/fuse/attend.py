"""Replaces attention by one node of bf16kit's CPU kernel: from query, key and value to the merged heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from converter.fuse.attention import Attention, Mask, SelectionMask, attention
from converter.fuse.functions import FunctionBody, Fusing, Fusion
from converter.graph.initializers import initializer

_FLOAT = ir.TensorType(ir.DataType.FLOAT)
_OPERANDS = ("q", "k", "v")
_HEADS_FIRST, _COLUMNS_FIRST = [0, 2, 1, 3], [0, 2, 3, 1]


def attend(fusing: Fusing, node: ir.Node) -> Fusion | None:
    """Replace the attention around the Softmax ``node`` by ``bf16kit::Attention_…``; None if there is none.

    If the product with the values is to round, the operator is ``bf16kit::AttentionBf16_…``. The kernel's node takes
    the name of that product, and its output the name and place of the output of the Reshape that merged the heads.
    """
    found = attention(node)
    if found is None:
        return None
    values, result = found.values, found.nodes[-1].outputs[0]
    record = Fusion(
        "attention",
        node.name or "",
        values.name or "",
        tuple(each.name or "" for each in found.nodes),
        (result.name or "",),
    )
    variant = AttentionVariant.of(found, rounds=values.name in fusing.rounding)
    mask = _combined(fusing, found.masks, values)
    inputs = [found.q.value, found.k.value, found.v.value, *([] if mask is None else [mask])]
    (output,) = fusing.operator(function(variant, fusing.opset), inputs, attributes(found), values, name=values.name)
    fusing.replace({result: output}, found.nodes[::-1], found.shape)
    return record


def _combined(fusing: Fusing, masks: Sequence[Mask], before: ir.Node) -> ir.Value | None:
    """Return what ``masks`` make of scores of zero, to be added to the scores; None if there are no masks.

    A selection replaces what the masks before it made, as it replaces scores. Its number absorbs any score added to it,
    and two selections never add up to minus infinity. Layers with the same masks share the result.
    """
    total: ir.Value | None = None
    for mask in masks:
        if isinstance(mask, SelectionMask):
            hidden = _number(fusing, mask.number)
            shown = _number(fusing, 0.0) if total is None else total
            node = ir.node("Where", [mask.condition, *((hidden, shown) if mask.hides else (shown, hidden))])
        elif total is None:
            total = mask
            continue
        else:
            node = ir.node("Add", [total, mask])
        key = (mask, total)
        if key not in fusing.made:
            fusing.made[key] = fusing.insert(node, before, "attention/mask", _FLOAT, None)
        total = fusing.made[key]
    return total


def _number(fusing: Fusing, number: float) -> ir.Value:
    if number not in fusing.made:
        name = fusing.fresh("attention/number")
        fusing.made[number] = initializer(fusing.graph, name, ir.tensor(np.float32(number), name=name))
    return fusing.made[number]


@dataclass(frozen=True, slots=True)
class AttentionVariant:
    """One variant of the operator. ``layouts`` has a letter each for q, k and v: r in rows, h in heads. With
    ``rounds``, the factors of products are rounded to bf16 first."""

    layouts: str
    grouped: bool
    masked: bool
    rounds: bool = False

    @classmethod
    def of(cls, attention: Attention, *, rounds: bool = False) -> AttentionVariant:
        return cls(attention.layouts, attention.q.heads != attention.k.heads, bool(attention.masks), rounds)

    @property
    def op_type(self) -> str:
        """The operator's name, such as ``Attention_rrr_mask``; kernels/ort/attention_op.cpp registers them all."""
        parts = ["AttentionBf16" if self.rounds else "Attention", self.layouts]
        parts += [part for part, has in (("grouped", self.grouped), ("mask", self.masked)) if has]
        return "_".join(parts)

    @property
    def lists(self) -> Iterator[str]:
        """The attributes with integer lists that only the function of the operator reads."""
        yield from (f"heads_of_{name}" for name, form in zip(_OPERANDS, self.layouts, strict=True) if form == "r")
        if self.grouped:
            yield "groups"
        yield "merged"


def attributes(attention: Attention) -> dict[str, int | float | list[int]]:
    """Return a node's attributes. The lists are shapes that a function cannot compute, and the key head that each
    query head reads."""
    heads, kv_heads = attention.q.heads, attention.k.heads
    sizes = {
        f"heads_of_{name}": [0, 0, operand.heads, operand.columns]
        for name, operand in zip(_OPERANDS, (attention.q, attention.k, attention.v), strict=True)
    }
    sizes["groups"] = [head * kv_heads // heads for head in range(heads)]
    sizes["merged"] = [0, 0, heads * attention.v.columns]
    names = AttentionVariant.of(attention).lists
    return {"heads": heads, "kv_heads": kv_heads, "scale": attention.scale} | {name: sizes[name] for name in names}


def function(variant: AttentionVariant, opset: int) -> ir.Function:
    """Return the function of ``variant`` in the operators of ``opset``, 13 or newer.

    Q [batch, queries, heads · depth] or [batch, heads, queries, depth], K and V likewise, and the mask M, which
    broadcasts to [batch, heads, queries, keys], if there is one → Y [batch, queries, heads · width].
    """
    inputs = [ir.Value(name=name) for name in ("Q", "K", "V", "M")[: 4 if variant.masked else 3]]
    body = FunctionBody(opset)
    q, k, v = (
        _in_heads(body, variant, index, value, _COLUMNS_FIRST if index == 1 else _HEADS_FIRST)
        for index, value in enumerate(map(body.rounded, inputs[:3]) if variant.rounds else inputs[:3])
    )
    if variant.grouped:
        groups = body.integers_attribute("groups")
        k, v = body.add("Gather", k, groups, axis=1), body.add("Gather", v, groups, axis=1)
    scores = body.add("Mul", body.add("MatMul", q, k), body.number_attribute("scale"))
    if variant.masked:
        scores = body.add("Add", scores, inputs[3])
    result = (_rounded_weights if variant.rounds else _weights)(body, scores, v)
    rows = body.add("Reshape", body.add("Transpose", result, perm=_HEADS_FIRST), body.integers_attribute("merged"))
    rows.name = "Y"
    return body.function(variant.op_type, inputs, [rows], ("heads", "kv_heads", "scale", *variant.lists))


def _weights(body: FunctionBody, scores: ir.Value, v: ir.Value) -> ir.Value:
    return body.add("MatMul", body.add("Softmax", scores, axis=-1), v)


def _rounded_weights(body: FunctionBody, scores: ir.Value, v: ir.Value) -> ir.Value:
    """Return softmax(scores)·V, with the exponentials rounded before they are multiplied and summed."""
    exponentials = body.rounded(body.add("Exp", body.add("Sub", scores, body.over_rows("ReduceMax", scores))))
    last = body.add("Constant", value_ints=[-1])
    return body.add("Div", body.add("MatMul", exponentials, v), body.add("ReduceSum", exponentials, last))


def _in_heads(body: FunctionBody, variant: AttentionVariant, index: int, value: ir.Value, order: list[int]) -> ir.Value:
    """Return an operand as [batch, heads, …], its rows and columns in the given order."""
    if variant.layouts[index] == "r":
        value = body.add("Reshape", value, body.integers_attribute(f"heads_of_{_OPERANDS[index]}"))
        return body.add("Transpose", value, perm=order)
    return value if order == _HEADS_FIRST else body.add("Transpose", value, perm=[0, 1, 3, 2])
