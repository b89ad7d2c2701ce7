"""Replaces convolutions by weights stored in bf16 by bf16kit's CPU kernel, which reads images with their channels last.

Each gets a Transpose before it and one after it. ONNX Runtime removes those that meet, also through elementwise nodes
(docs/decisions/0088-convolutions.md), so that only the borders of a region of such convolutions are transposed. A
region is left to ONNX Runtime if its borders are large beside its arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from bf16kit.converter.fuse.activations import FUNCTIONS, Activation, activation
from bf16kit.converter.fuse.functions import (
    ROUNDED,
    Fusing,
    Fusion,
    Kind,
    chain,
    define,
    panel_form,
    panel_shapes,
)
from bf16kit.converter.fuse.multiply import MATRICES
from bf16kit.converter.fuse.products import product, takes_bias
from bf16kit.converter.graph.initializers import const, const_dims, constant_number, initializer, only_reader

# The kernel's; kernels/ort/conv_op.cpp. Other activations stay nodes.
_ACTIVATIONS: tuple[Activation, ...] = ("none", "relu", "silu", "relu6")
_FEWEST_CHANNELS = 16  # of a depthwise convolution
# The smallest dense convolution that is faster than ONNX Runtime's: a tile has 32 columns, and sums as short as in a
# model's first layers take less time than what surrounds them.
_LEAST_K, _LEAST_N = 32, 32
_LEAST = 16  # of both in a bottleneck (bottleneck.py), whose wide images stay in the cache
# Operators, most of them elementwise, through which ONNX Runtime moves a Transpose (held by a test).
_TRANSPARENT = frozenset({"Add", "Clip", "Div", "HardSigmoid", "HardSwish", "LeakyRelu", "Mul", "Pad", "Relu"})
_TRANSPARENT |= {"Sigmoid", "Sub", "Tanh"}
MEANS = frozenset({"GlobalAveragePool", "ReduceMean"})  # whose lines ONNX Runtime averages with channels last
# Multiplications for each element that is transposed at a border, at least: then borders take at most 6 % of the time.
_WORTH = 200
_PIXELS = 56  # what an unknown height or width is taken for: only the ratio of arithmetic and borders depends on it


@dataclass(frozen=True, slots=True)
class Convolution:
    """A Conv of the main graph over sequences or images [batch, channels, …], by the initializer ``weight``, [n, …].

    ``pad`` is a Pad before it that the kernel does too.
    """

    node: ir.Node
    weight: ir.Value
    depthwise: bool
    pad: ir.Node | None

    @property
    def x(self) -> ir.Value | None:
        return (self.pad or self.node).inputs[0]

    @property
    def channels(self) -> int:
        return const_dims(self.weight)[0 if self.depthwise else 1]

    @property
    def n(self) -> int:
        return const_dims(self.weight)[0]

    @property
    def kernel_shape(self) -> list[int]:
        return [*const_dims(self.weight)[2:]]

    def windows(self) -> dict[str, list[int]]:
        """Return the attributes that say which windows are multiplied, all of them written out."""
        given, rank = self.node.attributes, len(self.kernel_shape)
        pads = [*given.get_ints("pads", [0] * 2 * rank)]
        if self.pad is not None:
            pads = [a + b for a, b in zip(pads, _zeros_added(self.pad) or pads, strict=True)]
        return {
            "kernel_shape": self.kernel_shape,
            "strides": [*given.get_ints("strides", [1] * rank)],
            "dilations": [*given.get_ints("dilations", [1] * rank)],
            "pads": pads,
        }


def convolution(node: ir.Node, narrow: Collection[str]) -> Convolution | None:
    """Return the convolution that ``node`` computes, if the kernel can; ``narrow`` names what is stored in bf16.

    Left out are groups other than single channels, padding that depends on the size, three dimensions, weights that
    other nodes read too, and single pixels, which are products. Requires: types and shapes are known.
    """
    if node.op_type != "Conv" or node.domain != "" or product(node, narrow) is not None:
        return None
    x, weight = node.inputs[:2]
    if x is None or x.dtype != ir.DataType.FLOAT or weight is None or weight.name not in narrow or x.is_initializer():
        return None
    shape, given = const_dims(weight), node.attributes
    group, bias = given.get_int("group", 1), node.inputs[2] if len(node.inputs) > 2 else None
    fits = len(shape) in (3, 4) and 0 not in shape and len(weight.uses()) == 1 and not weight.is_graph_output()
    padded = given.get_string("auto_pad", "NOTSET") not in ("NOTSET", "VALID") or min(given.get_ints("pads", [0])) < 0
    if not fits or padded or (bias is not None and not takes_bias(bias, shape[0])):
        return None
    depthwise = group == shape[0] >= _FEWEST_CHANNELS and shape[1] == 1
    dense = group == 1
    before = x.producer()
    pad = before if before is not None and only_reader(x) is node and _zeros_added(before) is not None else None
    return Convolution(node, weight, depthwise, pad) if dense or depthwise else None


def _pays(found: Convolution) -> bool:
    """Whether the kernel computes the convolution faster than ONNX Runtime, with channels last on both sides."""
    n, k = found.n, math.prod(const_dims(found.weight)[1:])
    if found.depthwise or (n >= _LEAST_N and k >= _LEAST_K):
        return True
    return min(n, k) >= _LEAST and _mixes(found.node) and _in_bottleneck(found.node)


def _in_bottleneck(node: ir.Node) -> bool:
    """Whether :mod:`~bf16kit.converter.fuse.bottleneck` will join the Conv ``node`` with two others."""
    for depthwise in (source(node.inputs[0]), _activated_reader(node)):
        if depthwise is None or depthwise.op_type != "Conv" or depthwise.attributes.get_int("group", 1) == 1:
            continue
        first, last = source(depthwise.inputs[0]), _activated_reader(depthwise)
        if first is None or last is None or not (_mixes(first) and _mixes(last)):
            continue
        functions = {activation(each.outputs[0])[0] for each in (first, depthwise)}
        return _activated_reader(first) is depthwise and len(functions) == 1 and functions <= {*_ACTIVATIONS}
    return False


def _mixes(node: ir.Node | None) -> bool:
    """Whether ``node`` is a Conv of each pixel by itself, with all channels."""
    if node is None or node.op_type != "Conv":
        return False
    given, window = node.attributes, const_dims(node.inputs[1])[2:]
    steps = {*window, *given.get_ints("strides", [1])}
    return steps == {1} and given.get_int("group", 1) == 1 and not any(given.get_ints("pads", []))


def _activated_reader(node: ir.Node) -> ir.Node | None:
    """Return the only reader of what the Conv ``node`` gives, or its activation; not a Pad, but what reads it."""
    after = activation(node.outputs[0])[1]
    reader = only_reader((node, *after)[-1].outputs[0]) if node.op_type == "Conv" else None
    return only_reader(reader.outputs[0]) if reader is not None and _zeros_added(reader) is not None else reader


def _zeros_added(node: ir.Node) -> list[int] | None:
    """Return how many zeros the Pad ``node`` adds to an image, before and behind, as a Conv's pads; None if others."""
    if node.op_type != "Pad" or node.domain != "" or node.attributes.get_string("mode", "constant") != "constant":
        return None
    given = const(node.inputs[1]) if len(node.inputs) > 1 else None
    other = node.inputs[2] if len(node.inputs) > 2 else None
    if given is None or len(node.inputs) > 3 or (other is not None and constant_number(other, rank=1) != 0):
        return None
    before, behind = given.numpy().reshape(2, -1).tolist()
    return None if any(before[:2] + behind[:2]) or min(before + behind) < 0 else before[2:] + behind[2:]


def worthwhile(graph: ir.Graph, narrow: Collection[str]) -> list[Convolution]:
    """Return the convolutions for the kernel: those in regions whose borders are small beside their arithmetic.

    A region is what convolutions and elementwise nodes connect; it begins with dense ones. ``narrow`` is as in
    :func:`convolution`.
    """
    found = {node: each for node in graph if (each := convolution(node, narrow)) is not None and _pays(each)}
    for node in [node for node in found if found[node].depthwise]:  # in the order of the graph
        if source(found[node].x) not in found:
            del found[node]
    chosen: list[Convolution] = []
    seen = set[ir.Node]()
    for start in found:
        if start not in seen:
            region = _region(start, found)
            seen |= region
            inside = [each for node, each in found.items() if node in region]
            if sum(map(_multiplications, inside)) >= _WORTH * sum(_elements(value) for value in _borders(region)):
                chosen += inside
    return chosen


def convolve(fusing: Fusing, node: ir.Node) -> Fusion | None:
    """Replace the Conv ``node`` by ``bf16kit::Conv…`` between two Transposes; None if it is none of ``fusing.images``.

    The kernel's node keeps the Conv's name. Its activation is computed by the kernel too, if it has it.
    """
    found = convolution(node, fusing.narrow) if node.name in fusing.images else None
    if found is None or not (found.depthwise or found.weight.name in fusing.panels):
        return None
    name, activated, after = node.outputs[0], *activation(node.outputs[0])
    if activated not in _ACTIVATIONS:
        activated, after = "none", ()
    result = after[-1].outputs[0] if after else name
    bias = node.inputs[2] if len(node.inputs) > 2 else _zeros(fusing, found)
    sizes: dict[str, Any] = {"channels": found.channels, "n": found.n, **found.windows()}
    rank, image, last = len(found.kernel_shape), result.shape, None if found.x is None else found.x.shape
    sizes["inward"], sizes["outward"] = [0, *range(2, rank + 2), 1], [0, rank + 1, *range(1, rank + 1)]
    if not found.depthwise:
        sizes |= panel_shapes(math.prod(found.kernel_shape) * found.channels, found.n)
        sizes |= {"window": [found.n, *found.kernel_shape, found.channels]}
    function = _function(found, activated, sizes, fusing.opset, rounds=node.name in fusing.rounding)
    x = _transposed(fusing, found.x, node, sizes["inward"], last)
    made = fusing.operator(function, [x, found.weight, bias], sizes, node, node.name)
    made.outputs[0].name, made.outputs[0].type = fusing.fresh(f"{node.name}/image"), result.type
    made.outputs[0].shape = None if image is None else ir.Shape([image[axis] for axis in sizes["inward"]])
    y = _transposed(fusing, made.outputs[0], node, sizes["outward"], made.outputs[0].shape)
    kind: Kind = "depthwise" if found.depthwise else "convolution"
    nodes = [each for each in (found.pad, node, *after) if each is not None]
    return fusing.replace(kind, node, nodes, made, {result: y})


# --- regions ----------------------------------------------------------------------------------------------------------


def _region(start: ir.Node, convolutions: Collection[ir.Node]) -> set[ir.Node]:
    """Return the convolutions and transparent nodes that images connect with ``start``."""
    region, waiting = set[ir.Node](), [start]
    while waiting:
        node = waiting.pop()
        if node in region or not (node in convolutions or _transparent(node)):
            continue
        region.add(node)
        for value in _images(node):
            producer = value.producer()
            waiting += [] if producer is None else [producer]
            waiting += [use.node for use in value.uses()]
    return region


def source(value: ir.Value | None) -> ir.Node | None:
    """Return the node that computes ``value``, or what the first transparent nodes before it read."""
    producer = None if value is None else value.producer()
    while producer is not None and _transparent(producer):
        value = next((v for v in producer.inputs if v is not None and not v.is_initializer()), None)
        producer = None if value is None else value.producer()
    return producer


def _transparent(node: ir.Node) -> bool:
    if node.domain != "" or (node.op_type not in _TRANSPARENT and node.op_type != "Concat"):
        return False
    return node.op_type != "Concat" or node.attributes.get_int("axis", 0) == 1


def _images(node: ir.Node) -> Iterator[ir.Value]:
    """Yield the images that ``node`` reads and gives: computed values of the result's rank, constants left out."""
    rank = len(node.outputs[0].shape or ())
    for value in (*node.inputs[: 1 if node.op_type == "Conv" else None], *node.outputs):
        if value is not None and not value.is_initializer() and len(value.shape or ()) == rank:
            yield value


def _borders(region: Collection[ir.Node]) -> set[ir.Value]:
    """Return the images of ``region`` that other nodes compute or read, or the graph's caller."""
    values = {value for node in region for value in _images(node)}
    return {
        value
        for value in values
        if value.producer() not in region
        or value.is_graph_output()
        or any(use.node not in region and use.node.op_type not in MEANS for use in value.uses())
    }


def _elements(value: ir.Value) -> int:
    """Return the elements of ``value`` for one of the batch."""
    return math.prod(size if isinstance(size, int) else _PIXELS for size in (value.shape or ())[1:])


def _multiplications(found: Convolution) -> int:
    return _elements(found.node.outputs[0]) * math.prod(const_dims(found.weight)[1:])


# --- the kernel's operators -------------------------------------------------------------------------------------------


def _transposed(fusing: Fusing, value: ir.Value | None, before: ir.Node, order: Sequence[int], shape: Any) -> ir.Value:
    node = ir.node("Transpose", [value], attributes={"perm": order})
    moved = None if shape is None else [shape[axis] for axis in order]
    return fusing.insert(node, before, f"{before.name}/transpose", ir.TensorType(ir.DataType.FLOAT), moved)


def _zeros(fusing: Fusing, found: Convolution) -> ir.Value:
    """Return a bias of zeros, computed at load: the files have none. Convolutions of equally many channels share it."""
    key = "zeros", found.n
    if key not in fusing.made:
        name = fusing.fresh(f"zeros/{found.n}")
        shape = initializer(fusing.graph, name, ir.tensor([found.n], ir.DataType.INT64, name=name))
        node = ir.node("ConstantOfShape", [shape])
        kind = ir.TensorType(ir.DataType.FLOAT)
        fusing.made[key] = fusing.insert(node, found.node, f"{name}/bias", kind, [found.n])
    return fusing.made[key]


def _function(
    found: Convolution, activated: Activation, sizes: dict[str, Any], opset: int, *, rounds: bool
) -> ir.Function:
    """Return the function: X [batch, …, channels], the weight W, the bias B [n] → Y [batch, …, n].

    W is k·n bf16 in panels, its rows ordered as a window [*kernel_shape, channels]; or [channels, 1, *kernel_shape] if
    each channel is convolved by itself.
    """
    rounds = rounds and not found.depthwise
    form = panel_form(found.n)
    stem = "ConvDepthwise" if found.depthwise else f"Conv{'Bf16' if rounds else ''}_{form}"
    windows = ", ".join(f"{name}: ints = @{name}" for name in found.windows())
    if found.depthwise:
        body, group = "C = Cast <to = 1> (W) ", ", group: int = @channels"
    else:
        body, group = MATRICES[form].format(s=""), ""
        steps = "Transpose <perm = [1, 0]> (#)", "Reshape (#, window)", "Transpose <perm: ints = @outward> (#)"
        body += chain("M", "C", *steps, "Cast <to = 1> (#)")
    body += chain("X", "I", *(ROUNDED if rounds else ()), "Transpose <perm: ints = @outward> (#)")
    body += f"O = Conv <{windows}{group}> (I, C, B) "
    body += chain("O", "Z" if FUNCTIONS[activated] else "Y", "Transpose <perm: ints = @inward> (#)")
    op_type = "_".join([stem, *([] if activated == "none" else [activated])])
    return define(op_type, ["X", "W", "B"], ["Y"], sizes, opset, body + FUNCTIONS[activated])
