"""Finds normalisations over rows, and the residual sums before them, for one node of bf16kit's CPU kernel each.

LayerNormalization is an operator, taken together with the sum before it. (ONNX Runtime fuses the two as well, but its
operator takes five times as long as the two apart.) RMS normalisation is written out by exporters;
:mod:`converter.fuse.rootmeansquare` recognises it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from converter.fuse.rootmeansquare import root_mean_square
from converter.graph.initializers import const, const_dims
from converter.graph.values import is_onnx_operator, known_shape, same_dims

FLOAT = ir.DataType.FLOAT
_EPSILON = 1e-5  # the operators' default


@dataclass(frozen=True, slots=True)
class Norm:
    """A normalisation of ``x`` over its last dimension by ``nodes``, in order, with a row of ``scale`` and ``bias``.

    ``scale`` and ``bias`` are initializers. With ``rms`` it divides by the root of the mean square, otherwise it works
    as LayerNormalization. If ``add`` is given, it computes x as the sum of two values of x's shape.
    """

    nodes: tuple[ir.Node, ...]
    x: ir.Value
    scale: ir.Value
    bias: ir.Value | None
    epsilon: float
    rms: bool
    add: ir.Node | None = None

    @property
    def gives_sum(self) -> bool:
        """Whether other nodes read the sum too, as they do if each layer normalises its input."""
        others = any(node not in self.nodes for node, _ in self.x.uses())
        return self.add is not None and (others or self.x.is_graph_output())

    @property
    def variant(self) -> NormVariant:
        return NormVariant(self.rms, self.add is not None, self.bias is not None, self.gives_sum)


@dataclass(frozen=True, slots=True)
class NormVariant:
    """One of the kernel's operators; ``kernels/ort/norm_op.cpp`` registers them all."""

    rms: bool
    adds: bool
    has_bias: bool
    gives_sum: bool

    @property
    def op_type(self) -> str:
        """The operator's name, such as ``AddLayerNorm_bias``."""
        stem = f"{'Add' if self.adds else ''}{'Rms' if self.rms else 'Layer'}Norm"
        return f"{stem}{'_bias' if self.has_bias else ''}{'_sum' if self.gives_sum else ''}"


def norm(node: ir.Node) -> Norm | None:
    """Return the normalisation at ``node``: an operator, or the mean of one that is written out; None for other nodes.

    Requires: types and shapes are known.
    """
    return (_layer_norm(node) or _rms_norm(node)) if is_onnx_operator(node) else None


def _layer_norm(node: ir.Node) -> Norm | None:
    """Match LayerNormalization of a sum; without a sum, it is left to ONNX Runtime."""
    found = _operator(node, rms=False) if node.op_type == "LayerNormalization" else None
    add = None if found is None else _sum(found.x)
    return None if found is None or add is None else replace(found, add=add)


def _rms_norm(node: ir.Node) -> Norm | None:
    if node.op_type == "RMSNormalization":
        found = _operator(node, rms=True)
    else:
        written_out = root_mean_square(node)
        found = (
            None
            if written_out is None
            else Norm(written_out.nodes, written_out.x, written_out.scale, None, written_out.epsilon, True)
        )
    return None if found is None else replace(found, add=_sum(found.x))


def _operator(node: ir.Node, *, rms: bool) -> Norm | None:
    """Match ``node``, a normalisation operator, if it works in fp32 over the last dimension and has one used output."""
    x, shape, axis = node.inputs[0], known_shape(node.inputs[0]), node.attributes.get("axis")
    if x is None or x.dtype != FLOAT or not shape or (axis is not None and axis.as_int() not in (-1, len(shape) - 1)):
        return None
    stash, epsilon = node.attributes.get("stash_type"), node.attributes.get("epsilon")
    others = any(output.uses() or output.is_graph_output() for output in node.outputs[1:])
    weights = [value for value in node.inputs[1:] if value is not None]
    rows = all(const(value) is not None and const_dims(value) == (shape[-1],) for value in weights)
    if not rows or not weights or others or (stash is not None and stash.as_int() != 1):
        return None
    bias = weights[1] if len(weights) > 1 else None
    return Norm((node,), x, weights[0], bias, _EPSILON if epsilon is None else epsilon.as_float(), rms)


def _sum(total: ir.Value) -> ir.Node | None:
    """Return the Add that computes ``total`` from two computed values of its shape, or None."""
    add = total.producer()
    if add is None or add.op_type != "Add" or not is_onnx_operator(add):
        return None
    fits = all(value is not None and _computed(value) and same_dims(value, total) for value in add.inputs)
    return add if fits else None


def _computed(value: ir.Value) -> bool:
    """Whether ``value`` is fp32 and no constant; a constant may be a product's bias."""
    return value.dtype == FLOAT and not value.is_initializer()
