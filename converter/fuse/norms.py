"""Finds normalisations over rows, and the residual sums before them, for one node of bf16kit's CPU kernel each.

LayerNormalization is an operator, taken together with the sum before it. (ONNX Runtime fuses the two as well, but its
operator takes five times as long as the two apart.) RMS normalisation is written out by exporters;
:mod:`converter.fuse.norms` recognises it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from converter.fuse.functions import FunctionBody, Fusing, Fusion
from converter.graph.initializers import const, const_dims
from converter.graph.values import constant_number, is_onnx_operator, known_shape, only_reader, same_dims

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


@dataclass(frozen=True, slots=True)
class RootMeanSquare:
    """The ``nodes``, in order, from the square of ``x`` to the product with ``scale``, an initializer of one row."""

    nodes: tuple[ir.Node, ...]
    x: ir.Value
    scale: ir.Value
    epsilon: float


def root_mean_square(mean: ir.Node) -> RootMeanSquare | None:
    """Match the normalisation that the ReduceMean ``mean`` is part of; None if the nodes compute anything else."""
    square = _square(mean)
    x = None if square is None else square.inputs[0]
    shape = known_shape(x)
    if square is None or x is None or x.dtype != FLOAT or not shape or not _over_last_axis(mean, len(shape)):
        return None
    added = only_reader(mean.outputs[0])
    epsilon = None if added is None or added.op_type != "Add" else _other_operand(added, mean.outputs[0], len(shape))
    if added is None or epsilon is None or not 0 <= epsilon < float("inf"):
        return None
    divided = _divided(x, added.outputs[0], len(shape))
    scaled = None if divided is None else only_reader(divided[-1].outputs[0])
    if divided is None or scaled is None or scaled.op_type != "Mul":
        return None
    (scale,) = [value for value in scaled.inputs if value is not divided[-1].outputs[0]] or [None]
    if scale is None or scale.dtype != FLOAT or const_dims(scale) != (shape[-1],):
        return None
    return RootMeanSquare((square, mean, added, *divided, scaled), x, scale, epsilon)


def _square(mean: ir.Node) -> ir.Node | None:
    """Return the node that squares a value, if ``mean`` is a ReduceMean and alone reads the square."""
    value = mean.inputs[0] if mean.op_type == "ReduceMean" else None
    node = None if value is None else value.producer()
    if value is None or node is None or only_reader(value) is not mean or node.domain != "":
        return None
    if node.op_type == "Pow":
        return node if constant_number(node.inputs[1], rank=0) == 2 else None
    return node if node.op_type == "Mul" and node.inputs[0] is node.inputs[1] else None


def _over_last_axis(mean: ir.Node, rank: int) -> bool:
    """Whether ``mean`` is taken over the last of ``rank`` dimensions, which stays with size 1."""
    keep, axes_attribute = mean.attributes.get("keepdims"), mean.attributes.get("axes")
    axes_tensor = const(mean.inputs[1]) if len(mean.inputs) > 1 else None
    axes = [] if axes_attribute is None else list(axes_attribute.as_ints())
    if axes_tensor is not None:
        axes = [int(axis) for axis in axes_tensor.numpy().reshape(-1)]
    return axes in ([-1], [rank - 1]) and (keep is None or keep.as_int() == 1)


def _divided(x: ir.Value, shifted: ir.Value, rank: int) -> tuple[ir.Node, ...] | None:
    """Return the nodes, in order, that divide ``x`` by the root of ``shifted`` or multiply it by the reciprocal."""
    root = only_reader(shifted)
    if root is None:
        return None
    power = constant_number(root.inputs[1], rank=0) if root.op_type == "Pow" and root.inputs[0] is shifted else None
    if root.op_type != "Sqrt" and power not in (0.5, -0.5):
        return None
    nodes, inverse = [root], power == -0.5
    last = only_reader(root.outputs[0])
    if last is not None and not inverse and _reciprocal(last, root.outputs[0], rank):
        nodes.append(last)
        last, inverse = only_reader(last.outputs[0]), True
    factor = nodes[-1].outputs[0]
    if last is None or last.op_type != ("Mul" if inverse else "Div"):
        return None
    operands = list(last.inputs)
    return (*nodes, last) if operands == [x, factor] or (inverse and operands == [factor, x]) else None


def _reciprocal(node: ir.Node, value: ir.Value, rank: int) -> bool:
    """Whether ``node`` computes 1 / ``value``."""
    if node.op_type == "Div":
        return node.inputs[1] is value and constant_number(node.inputs[0], rank=rank) == 1
    return node.op_type == "Reciprocal"


def _other_operand(node: ir.Node, value: ir.Value, rank: int) -> float | None:
    """Return the constant number that is the other operand of ``node``, beside ``value``."""
    return constant_number(node.inputs[1] if node.inputs[0] is value else node.inputs[0], rank=rank)


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
    result = _rms_norm_nodes(body, total, *weights) if variant.rms else _layer_norm_nodes(body, total, *weights)
    outputs = [result, *([total] if variant.gives_sum else [])]
    for name, output in zip("YT", outputs, strict=False):
        output.name = name
    return body.function(variant.op_type, inputs, outputs, ("epsilon",))


def _layer_norm_nodes(body: FunctionBody, x: ir.Value, *weights: ir.Value) -> ir.Value:
    epsilon = ir.RefAttr("epsilon", "epsilon", ir.AttributeType.FLOAT)
    body.extend([ir.Node("", "LayerNormalization", [x, *weights], [ir.AttrInt64("axis", -1), epsilon])])
    return body.nodes[-1].outputs[0]


def _rms_norm_nodes(body: FunctionBody, x: ir.Value, scale: ir.Value) -> ir.Value:
    mean = body.over_rows("ReduceMean", body.add("Mul", x, x))
    root = body.add("Sqrt", body.add("Add", mean, body.number_attribute("epsilon")))
    return body.add("Mul", body.add("Div", x, root), scale)
