"""Residual sums and the LayerNormalization that follows them, found in a graph: one node of bf16kit's CPU kernel.

ONNX Runtime fuses the two as well, into an operator that takes five times as long as the two apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from converter.cpukernel.values import known_shape, plain, same_dims
from converter.graph.initializers import const, const_dims

FLOAT = ir.DataType.FLOAT


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
        return op_type(has_bias=self.has_bias, gives_sum=self.gives_sum)


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


def op_type(*, has_bias: bool, gives_sum: bool) -> str:
    """The operator of a variant."""
    return f"AddLayerNorm{'_bias' if has_bias else ''}{'_sum' if gives_sum else ''}"
