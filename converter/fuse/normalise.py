"""Replaces a normalisation over rows, with the sum before it, by one node of bf16kit's CPU kernel."""

from __future__ import annotations

import onnx_ir as ir

from converter.fuse.functions import FunctionBody
from converter.fuse.fusing import Fusing, Fusion
from converter.fuse.norms import NormVariant, norm


def normalise(fusing: Fusing, node: ir.Node) -> Fusion | None:
    """Replace the normalisation at ``node`` by ``bf16kit::AddLayerNorm…`` or ``…RmsNorm…``; None if there is none.

    The kernel's node takes the name of the last node that it replaces, and the place of the first. Of two
    normalisations of one sum, the first computes the sum, and the second reads it.
    """
    found = norm(node)
    if found is None:
        return None
    add, last = found.add, found.nodes[-1]
    first, removed = (found.nodes[0], found.nodes) if add is None else (add, (add, *found.nodes))
    operands = [found.x] if add is None else [*add.inputs]
    variant = found.variant
    outputs = fusing.operator(
        function(variant, fusing.opset),
        [*operands, found.scale, *([] if found.bias is None else [found.bias])],
        {"epsilon": found.epsilon},
        first,
        name=last.name,
        outputs=2 if variant.gives_sum else 1,
    )
    replaced = dict(zip((last.outputs[0], found.x), outputs, strict=False))
    record = Fusion(
        "normalisation",
        node.name or "",
        last.name or "",
        tuple(each.name or "" for each in removed),
        tuple(value.name or "" for value in replaced),
    )
    fusing.replace(replaced, removed[::-1])
    return record


def function(variant: NormVariant, opset: int) -> ir.Function:
    """Return the function of ``variant`` in the operators of ``opset``, 13 or newer, 17 for LayerNormalization.

    X [..., width], S of the same shape if it adds one, W [width], and the bias B [width] if it has one
    → Y [..., width], and T, the sum, if wanted.
    """
    names = ["X", *(["S"] if variant.adds else []), "W", *(["B"] if variant.has_bias else [])]
    inputs = [ir.Value(name=name) for name in names]
    body = FunctionBody(opset)
    total = body.add("Add", *inputs[:2]) if variant.adds else inputs[0]
    weights = inputs[2 if variant.adds else 1 :]
    result = _root_mean_square(body, total, *weights) if variant.rms else _layer_norm(body, total, *weights)
    outputs = [result, *([total] if variant.gives_sum else [])]
    for name, output in zip("YT", outputs, strict=False):
        output.name = name
    return body.function(variant.op_type, inputs, outputs, ("epsilon",))


def _layer_norm(body: FunctionBody, x: ir.Value, *weights: ir.Value) -> ir.Value:
    epsilon = ir.RefAttr("epsilon", "epsilon", ir.AttributeType.FLOAT)
    body.extend([ir.Node("", "LayerNormalization", [x, *weights], [ir.AttrInt64("axis", -1), epsilon])])
    return body.nodes[-1].outputs[0]


def _root_mean_square(body: FunctionBody, x: ir.Value, scale: ir.Value) -> ir.Value:
    mean = body.over_rows("ReduceMean", body.add("Mul", x, x))
    root = body.add("Sqrt", body.add("Add", mean, body.number_attribute("epsilon")))
    return body.add("Mul", body.add("Div", x, root), scale)
