"""Replaces attention by one node of bf16kit's CPU kernel: from query, key and value to the merged heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from bf16kit.converter.fuse.attention import Attention, Mask, SelectionMask, attention
from bf16kit.converter.fuse.functions import ROUNDED, Fusing, Fusion, chain, define, over_rows
from bf16kit.converter.graph.initializers import initializer

_FLOAT = ir.TensorType(ir.DataType.FLOAT)
_FEW_KEYS = 16
_HEADS_FIRST, _COLUMNS_FIRST = [0, 2, 1, 3], [0, 2, 3, 1]


def attend(fusing: Fusing, node: ir.Node) -> Fusion | None:
    """Replace the attention around the Softmax ``node`` by ``bf16kit::Attention_…``; None if there is none.

    If the product with the values is to round, the operator is ``bf16kit::AttentionBf16_…``. The kernel's node takes
    the name of that product, and its output the name and place of the output of the Reshape that merged the heads.
    """
    found = attention(node)
    if found is None or not _pays(found):
        return None
    values, sizes = found.values, attributes(found)
    defined = _function(found, values.name in fusing.rounding, fusing.opset, sizes)
    mask = _combined(fusing, found.masks, values)
    inputs = [found.q.value, found.k.value, found.v.value, *([] if mask is None else [mask])]
    made = fusing.operator(defined, inputs, sizes, values, values.name)
    replaced = {found.nodes[-1].outputs[0]: made.outputs[0]}
    return fusing.replace("attention", node, found.nodes, made, replaced, found.shape)


def _pays(found: Attention) -> bool:
    """Whether the kernel's node is as fast as what it replaces: few keys lose (docs/decisions/0090).

    Not if the node also saves the Transposes of rows, or has one query. With an unknown number of keys, it pays.
    """
    few = isinstance(found.k.rows, int) and found.k.rows <= _FEW_KEYS
    return not few or found.q.in_rows or found.k.in_rows or found.v.in_rows or found.q.rows == 1


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


def attributes(found: Attention) -> dict[str, Any]:
    """Return a node's attributes.

    Only the function reads the lists: shapes that it cannot compute, for operands in rows, and the key head that each
    query head reads, if heads are shared.
    """
    heads, kv_heads = found.q.heads, found.k.heads
    sizes: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "scale": found.scale}
    for name, operand in (("q", found.q), ("k", found.k), ("v", found.v)):
        if operand.in_rows:
            sizes[f"heads_of_{name}"] = [0, 0, operand.heads, operand.columns]
    if heads != kv_heads:
        sizes["groups"] = [head * kv_heads // heads for head in range(heads)]
    return sizes | {"merged": [0, 0, heads * found.v.columns]}


def _function(found: Attention, rounds: bool, opset: int, attributes: Mapping[str, Any]) -> ir.Function:
    """Return the function of the operator for ``found``; with ``rounds``, it rounds the factors of products to bf16.

    Q [batch, queries, heads · depth] or [batch, heads, queries, depth], K and V likewise, and the mask M, which
    broadcasts to [batch, heads, queries, keys], if there is one → Y [batch, queries, heads · width]. The name has a
    letter each for q, k and v: r for rows, h for heads; kernels/ort/attention_op.cpp registers them all.
    """
    grouped, masked = "groups" in attributes, bool(found.masks)
    operands = dict(zip("QKV", (found.q, found.k, found.v), strict=True))
    layouts = "".join("r" if each.in_rows else "h" for each in operands.values())
    parts = ["AttentionBf16" if rounds else "Attention", layouts, *["grouped"][:grouped], *["mask"][:masked]]
    body = ""
    for name, operand in operands.items():
        steps = [*ROUNDED] if rounds else []
        if operand.in_rows:
            order = _COLUMNS_FIRST if name == "K" else _HEADS_FIRST
            steps += [f"Reshape (#, heads_of_{name.lower()})", f"Transpose <perm = {order}> (#)"]
        elif name == "K":
            steps.append("Transpose <perm = [0, 1, 3, 2]> (#)")
        steps += ["Gather <axis = 1> (#, groups)"][: grouped and name != "Q"]
        body += chain(name, f"{name}_heads", *steps)
    body += chain("Q_heads", "scores", "MatMul (#, K_heads)", "Mul (#, scale)", *["Add (#, M)"][:masked])
    if rounds:  # the exponentials, before they are multiplied and summed
        body += chain("scores", "most", over_rows("ReduceMax", opset))
        body += chain("scores", "powers", "Sub (#, most)", "Exp (#)", *ROUNDED)
        body += "sum = ReduceSum (powers, last) "
        weighted = ("MatMul (#, V_heads)", "Div (#, sum)")
    else:
        weighted = ("Softmax <axis = -1> (#)", "MatMul (#, V_heads)")
    merge = (f"Transpose <perm = {_HEADS_FIRST}> (#)", "Reshape (#, merged)")
    body += chain("powers" if rounds else "scores", "Y", *weighted, *merge)
    return define("_".join(parts), [*"QKV", *"M"[:masked]], ["Y"], attributes, opset, body)
