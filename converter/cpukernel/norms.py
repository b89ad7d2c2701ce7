"""Residual sums and the LayerNormalization that follows them become one node of bf16kit's CPU kernel.

ONNX Runtime fuses the two as well, into an operator that takes five times as long as the two apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from bf16kit.runtime.kernel import DOMAIN
from converter.cpukernel.functions import Body, define
from converter.cpukernel.values import known_shape, plain, same_dims
from converter.graph.initializers import const, const_dims
from converter.graph.step import Step
from converter.passes.rewriting import replace_output

FLOAT = ir.DataType.FLOAT
_EPSILON = 1e-5  # what LayerNormalization has unless it says otherwise


@dataclass(frozen=True, slots=True)
class Norm:
    """``add`` gives a sum of two values of its own shape, which ``layer_norm`` normalises over the last dimension."""

    add: ir.Node
    layer_norm: ir.Node

    @property
    def has_bias(self) -> bool:
        return len(self.layer_norm.inputs) > 2 and self.layer_norm.inputs[2] is not None

    @property
    def gives_sum(self) -> bool:
        """Whether others need the sum as well, as they do where each layer normalises before it computes."""
        total = self.add.outputs[0]
        return len(tuple(total.uses())) > 1 or total.is_graph_output()

    @property
    def op_type(self) -> str:
        """Its name, such as ``AddLayerNorm_bias``; kernels/ort/norm_op.cpp registers them all."""
        return _op_type(has_bias=self.has_bias, gives_sum=self.gives_sum)


def norms(model: ir.Model) -> list[Norm]:
    """Those of the main graph, in order. Requires: types and shapes are known."""
    found = (_norm(node) for node in model.graph if node.op_type == "LayerNormalization" and plain(node))
    return [norm for norm in found if norm is not None]


def _norm(node: ir.Node) -> Norm | None:
    total = node.inputs[0]
    add = None if total is None else total.producer()
    if total is None or add is None or add.op_type != "Add" or not plain(add) or add.graph is not node.graph:
        return None
    shape, axis = known_shape(total), node.attributes.get("axis")
    if shape is None or not shape or (axis is not None and axis.as_int() not in (-1, len(shape) - 1)):
        return None
    if not all(_computed(value) and same_dims(value, total) for value in add.inputs if value is not None):
        return None
    stash = node.attributes.get("stash_type")
    others = any(output.uses() or output.is_graph_output() for output in node.outputs[1:])
    weights = [value for value in node.inputs[1:] if value is not None]
    rows = all(const(value) is not None and const_dims(value) == (shape[-1],) for value in weights)
    return Norm(add, node) if rows and weights and not others and (stash is None or stash.as_int() == 1) else None


def _computed(value: ir.Value) -> bool:
    """Whether ``value`` is fp32 and no constant: one may be the bias of a product."""
    return value.dtype == FLOAT and not value.is_initializer()


class Normalise(Step):
    """Let ``bf16kit::AddLayerNorm…`` do what :func:`norms` finds, and define each variant as a function.

    The node has the name of the LayerNormalization and stands where the sum was; values keep their names.

    Requires: types and shapes are known.
    """

    name = "use the CPU kernel's normalisation"

    def apply(self, model: ir.Model) -> bool:
        functions, opset = dict[str, ir.Function](), model.opset_imports[""]
        for norm in norms(model):
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
    return body.function(_op_type(has_bias=has_bias, gives_sum=gives_sum), inputs, outputs, ("epsilon",))


def _op_type(*, has_bias: bool, gives_sum: bool) -> str:
    return f"AddLayerNorm{'_bias' if has_bias else ''}{'_sum' if gives_sum else ''}"
