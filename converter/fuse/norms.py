"""Replaces normalisations over rows, with the residual sums before them, by one node of bf16kit's CPU kernel each.

LayerNormalization is an operator, taken together with the sum before it. (ONNX Runtime fuses the two as well, but its
operator takes five times as long as the two apart.) RMS normalisation is an operator too, or written out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from bf16kit.converter.fuse.functions import Fusing, Fusion, chain, define, over_rows
from bf16kit.converter.graph.initializers import (
    const,
    const_dims,
    constant_number,
    is_onnx_operator,
    known_shape,
    only_reader,
    same_dims,
)

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
    epsilon: float
    rms: bool
    bias: ir.Value | None = None
    add: ir.Node | None = None

    @property
    def gives_sum(self) -> bool:
        """Whether other nodes read the sum too, as they do if each layer normalises its input."""
        others = any(node not in self.nodes for node, _ in self.x.uses())
        return self.add is not None and (others or self.x.is_graph_output())


def normalise(fusing: Fusing, node: ir.Node) -> Fusion | None:
    """Replace the normalisation at ``node`` by ``bf16kit::AddLayerNorm…`` or ``…RmsNorm…``; None if there is none.

    The kernel's node takes the name of the last node that it replaces, and the place of the first. Of two
    normalisations of one sum, the first computes the sum, and the second reads it.
    """
    found = norm(node)
    if found is None:
        return None
    last, gives_sum = found.nodes[-1], found.gives_sum
    nodes = found.nodes if found.add is None else (found.add, *found.nodes)
    operands = [found.x] if found.add is None else [*found.add.inputs]
    inputs = [*operands, found.scale, *([] if found.bias is None else [found.bias])]
    defined, sizes = _function(found, gives_sum, fusing.opset), {"epsilon": found.epsilon}
    made = fusing.operator(defined, inputs, sizes, nodes[0], last.name, outputs=2 if gives_sum else 1)
    replaced = dict(zip((last.outputs[0], found.x), made.outputs, strict=False))
    return fusing.replace("normalisation", node, nodes, made, replaced)


def norm(node: ir.Node) -> Norm | None:
    """Return the normalisation at ``node``: an operator, or the mean of one that is written out; None for other nodes.

    LayerNormalization without a sum is left to ONNX Runtime. Requires: types and shapes are known.
    """
    if not is_onnx_operator(node):
        return None
    operator = node.op_type in ("LayerNormalization", "RMSNormalization")
    found = _operator(node) if operator else _root_mean_square(node)
    add = None if found is None else _sum(found.x)
    return None if found is None or (add is None and not found.rms) else replace(found, add=add)


def _operator(node: ir.Node) -> Norm | None:
    """Match ``node``, a normalisation operator, if it works in fp32 over the last dimension and has one used output."""
    x, shape, given = node.inputs[0], known_shape(node.inputs[0]), node.attributes
    if x is None or x.dtype != FLOAT or not shape or given.get_int("axis", -1) not in (-1, len(shape) - 1):
        return None
    others = any(output.uses() or output.is_graph_output() for output in node.outputs[1:])
    weights = [value for value in node.inputs[1:] if value is not None]
    rows = all(const(value) is not None and const_dims(value) == (shape[-1],) for value in weights)
    if not rows or not weights or others or given.get_int("stash_type", 1) != 1:
        return None
    bias = weights[1] if len(weights) > 1 else None
    epsilon = given.get_float("epsilon", _EPSILON)
    return Norm((node,), x, weights[0], epsilon, node.op_type == "RMSNormalization", bias)


def _sum(total: ir.Value) -> ir.Node | None:
    """Return the Add that computes ``total`` from two computed values of its shape; a constant may be a bias."""
    add = total.producer()
    if add is None or add.op_type != "Add" or not is_onnx_operator(add):
        return None
    fits = (
        value is not None and value.dtype == FLOAT and not value.is_initializer() and same_dims(value, total)
        for value in add.inputs
    )
    return add if all(fits) else None


# --- RMS normalisation, written out -----------------------------------------------------------------------------------


def _root_mean_square(mean: ir.Node) -> Norm | None:
    """Match the normalisation that the ReduceMean ``mean`` is part of; None if the nodes compute anything else."""
    square = _square(mean)
    x = None if square is None else square.inputs[0]
    shape = known_shape(x)
    if square is None or x is None or x.dtype != FLOAT or not shape or not _over_last_axis(mean, len(shape)):
        return None
    added = only_reader(mean.outputs[0])
    if added is None or added.op_type != "Add":
        return None
    epsilon = constant_number(_other(added, mean.outputs[0]), rank=len(shape))
    if epsilon is None or not 0 <= epsilon < float("inf"):
        return None
    divided = _divided(x, added.outputs[0], len(shape))
    scaled = only_reader(divided[-1].outputs[0]) if divided else None
    if scaled is None or scaled.op_type != "Mul":
        return None
    scale = _other(scaled, divided[-1].outputs[0])
    if scale is None or scale.dtype != FLOAT or const_dims(scale) != (shape[-1],):
        return None
    return Norm((square, mean, added, *divided, scaled), x, scale, epsilon, rms=True)


def _square(mean: ir.Node) -> ir.Node | None:
    """Return the node that squares a value, if ``mean`` is a ReduceMean and alone reads the square."""
    value = mean.inputs[0] if mean.op_type == "ReduceMean" else None
    node = None if value is None else value.producer()
    if value is None or node is None or only_reader(value) is not mean or not is_onnx_operator(node):
        return None
    if node.op_type == "Pow":
        return node if constant_number(node.inputs[1], rank=0) == 2 else None
    return node if node.op_type == "Mul" and node.inputs[0] is node.inputs[1] else None


def _over_last_axis(mean: ir.Node, rank: int) -> bool:
    """Whether ``mean`` is taken over the last of ``rank`` dimensions, which stays with size 1."""
    tensor = const(mean.inputs[1]) if len(mean.inputs) > 1 else None
    axes = list(mean.attributes.get_ints("axes", ())) if tensor is None else tensor.numpy().reshape(-1).tolist()
    return axes in ([-1], [rank - 1]) and mean.attributes.get_int("keepdims", 1) == 1


def _divided(x: ir.Value, value: ir.Value, rank: int) -> tuple[ir.Node, ...]:
    """Return the nodes, in order, that multiply ``x`` by the power -½ of ``value``, or divide it by the power ½."""
    nodes: list[ir.Node] = []
    exponent = 1.0
    while (node := only_reader(value)) is not None and (power := _power(node, value, rank)) is not None:
        nodes.append(node)
        value, exponent = node.outputs[0], exponent * power
    if node is None or exponent != {"Mul": -0.5, "Div": 0.5}.get(node.op_type):
        return ()
    fits = [*node.inputs] == [x, value] or (node.op_type == "Mul" and [*node.inputs] == [value, x])
    return (*nodes, node) if fits else ()


def _power(node: ir.Node, value: ir.Value, rank: int) -> float | None:
    """Return the exponent if ``node`` computes a power of ``value``."""
    if node.op_type == "Div":
        return -1.0 if node.inputs[1] is value and constant_number(node.inputs[0], rank=rank) == 1 else None
    if node.op_type == "Pow":
        return constant_number(node.inputs[1], rank=0) if node.inputs[0] is value else None
    return {"Sqrt": 0.5, "Reciprocal": -1.0}.get(node.op_type)


def _other(node: ir.Node, value: ir.Value) -> ir.Value | None:
    """Return the other operand of ``node``, beside ``value``."""
    return node.inputs[1] if node.inputs[0] is value else node.inputs[0]


# --- the kernel's operators -------------------------------------------------------------------------------------------


def _function(found: Norm, gives_sum: bool, opset: int) -> ir.Function:
    """Return the function of the operator for ``found``, such as ``AddLayerNorm_bias``.

    X [..., width], S of the same shape if it adds one, W [width], and the bias B [width] if it has one
    → Y [..., width], and T, the sum, if wanted. ``kernels/ort/norm_op.cpp`` registers them all.
    """
    adds, biased = found.add is not None, found.bias is not None
    parts = [f"{'Add' if adds else ''}{'Rms' if found.rms else 'Layer'}Norm", *["bias"][:biased], *["sum"][:gives_sum]]
    inputs = ["X", *"S"[:adds], "W", *"B"[:biased]]
    total, weights = "T" if adds else "X", ", ".join(inputs[1 + adds :])
    body = "T = Add (X, S) " if adds else ""
    if found.rms:
        mean = f"Mul (#, {total})", over_rows("ReduceMean", opset)
        body += chain(total, "root", *mean, "Add (#, epsilon)", "Sqrt (#)")
        body += chain(total, "Y", "Div (#, root)", "Mul (#, W)")
    else:
        body += f"Y = LayerNormalization <axis = -1, epsilon: float = @epsilon> ({total}, {weights})"
    epsilon = {"epsilon": found.epsilon}
    return define("_".join(parts), inputs, ["Y", *"T"[:gives_sum]], epsilon, opset, body)
