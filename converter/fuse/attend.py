"""Replaces attention by one node of bf16kit's CPU kernel: from query, key and value to the merged heads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from converter.fuse.attention import Mask, SelectionMask, attention
from converter.fuse.attentionop import AttentionVariant, attributes, function
from converter.fuse.fusing import Fusing, Fusion
from converter.graph.initializers import initializer

_FLOAT = ir.TensorType(ir.DataType.FLOAT)


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
