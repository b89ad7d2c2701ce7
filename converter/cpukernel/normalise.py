"""Residual sums and their normalisation go to bf16kit's CPU kernel: one node for the two."""

from __future__ import annotations

import onnx_ir as ir

from bf16kit.runtime.kernel import DOMAIN
from converter.cpukernel.functions import Body, define
from converter.cpukernel.norms import op_type
from converter.cpukernel.work import Work
from converter.graph.step import Step
from converter.passes.rewriting import replace_output

_EPSILON = 1e-5  # what LayerNormalization has unless it says otherwise


class Normalise(Step):
    """Let ``bf16kit::AddLayerNorm…`` do the sums of ``work`` that are normalised; define each as a function.

    The node has the name of the LayerNormalization and stands where the sum was; values keep their names.

    Requires: types and shapes are known.
    """

    name = "use the CPU kernel's normalisation"

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    def apply(self, model: ir.Model) -> bool:
        functions, opset = dict[str, ir.Function](), model.opset_imports[""]
        for norm in self._work.norms_in(model):
            node, add, op_type = norm.layer_norm, norm.add, norm.op_type
            functions[op_type] = function(has_bias=norm.has_bias, gives_sum=norm.gives_sum, opset=opset)
            epsilon = node.attributes.get("epsilon")
            made = ir.node(
                op_type,
                [*add.inputs, *(value for value in node.inputs[1:] if value is not None)],
                {"epsilon": _EPSILON if epsilon is None else epsilon.as_float()},
                domain=DOMAIN,
                num_outputs=2 if norm.gives_sum else 1,
                name=node.name,
            )
            model.graph.insert_before(add, made)
            for old, output in zip((node, add), made.outputs, strict=False):
                output.type, output.shape = old.outputs[0].type, old.outputs[0].shape
                replace_output(model.graph, old, output)
            if len(made.outputs) == 1:
                model.graph.remove(add, safe=True)
        if functions:
            define(model, functions.values())
        return bool(functions)


def function(*, has_bias: bool, gives_sum: bool, opset: int) -> ir.Function:
    """The function of a variant in the operators of ``opset``, 17 or newer.

    X and S [..., width], W [width], and the bias B [width] if it has one → Y [..., width], and T, the sum, if wanted.
    """
    inputs = [ir.Value(name=name) for name in ("X", "S", "W", "B")[: 4 if has_bias else 3]]
    body = Body(opset)
    total = body.add("Add", *inputs[:2])
    told = ir.RefAttr("epsilon", "epsilon", ir.AttributeType.FLOAT)
    body.extend([ir.Node("", "LayerNormalization", [total, *inputs[2:]], [ir.AttrInt64("axis", -1), told])])
    outputs = [body.nodes[-1].outputs[0], *([total] if gives_sum else [])]
    for name, output in zip("YT", outputs, strict=False):
        output.name = name
    return body.function(op_type(has_bias=has_bias, gives_sum=gives_sum), inputs, outputs, ("epsilon",))
