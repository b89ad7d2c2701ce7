"""Defines the kernel's ``bf16kit::Attention_…`` in ONNX's own operators, which run without the kernel's library.

``bf16kit::AttentionBf16_…`` round the factors of products to bf16 first: queries, keys, values, and the softmax's
exponentials. In the kernel as here, the division by the exponentials' sum comes after the product with the values, and
uses the sum of the rounded exponentials.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from converter.fuse.attention import Attention
from converter.fuse.functions import FunctionBody

_OPERANDS = ("q", "k", "v")
_HEADS_FIRST, _COLUMNS_FIRST = [0, 2, 1, 3], [0, 2, 3, 1]


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
