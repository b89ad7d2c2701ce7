"""Replaces normalisations over rows, with the sums before them, by one node of bf16kit's CPU kernel each."""

from __future__ import annotations

import onnx_ir as ir

from bf16kit.runtime.kernel import DOMAIN
from converter.fuse.functions import FunctionBody, define
from converter.fuse.norms import Norm, NormVariant
from converter.fuse.work import KernelWork
from converter.graph.step import Step
from converter.passes.rewriting import replace_output


class Normalise(Step):
    """Replace normalisations of ``work`` by ``bf16kit::AddLayerNorm…`` and ``…RmsNorm…``, defined as functions.

    The node takes the name of the last node that it replaces, and the place of the first. Values keep their names.

    Requires: types and shapes are known.
    """

    name = "use the CPU kernel's normalisation"

    def __init__(self, work: KernelWork) -> None:
        super().__init__()
        self._work = work

    def apply(self, model: ir.Model) -> bool:
        functions, opset = dict[str, ir.Function](), model.opset_imports[""]
        for norm in self._work.norms_in(model):
            variant = norm.variant
            functions[variant.op_type] = function(variant, opset)
            _replace(model.graph, norm, variant)
        if functions:
            define(model, functions.values())
        return bool(functions)


def _replace(graph: ir.Graph, norm: Norm, variant: NormVariant) -> None:
    add, last = norm.add, norm.result
    operands = [norm.x] if add is None else [*add.inputs]
    kernel_node = ir.node(
        variant.op_type,
        [*operands, norm.scale, *([] if norm.bias is None else [norm.bias])],
        {"epsilon": norm.epsilon},
        domain=DOMAIN,
        num_outputs=2 if variant.gives_sum else 1,
        name=last.name,
    )
    graph.insert_before(norm.nodes[0] if add is None else add, kernel_node)
    kernel_node.outputs[0].type, kernel_node.outputs[0].shape = last.outputs[0].type, last.outputs[0].shape
    replace_output(graph, last, kernel_node.outputs[0])
    graph.remove(norm.nodes[-2::-1], safe=True)
    if add is not None and variant.gives_sum:
        kernel_node.outputs[1].type, kernel_node.outputs[1].shape = norm.x.type, norm.x.shape
        replace_output(graph, add, kernel_node.outputs[1])
    elif add is not None:
        graph.remove(add, safe=True)


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
