"""Replaces convolutions by weights stored in bf16 by bf16kit's CPU kernel, which reads images with their channels last.

Each gets a Transpose before it and one after it. ONNX Runtime removes those that meet, also through elementwise nodes
(docs/decisions/0088-convolutions.md), so that only the borders of a region of such convolutions are transposed
(:mod:`bf16kit.converter.fuse.regions`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from bf16kit.converter.fuse import upsample
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
from bf16kit.converter.graph.initializers import (
    const,
    const_dims,
    constant_number,
    initializer,
    known_shape,
    only_reader,
)
from bf16kit.numerics.panels import WIDTH

# The kernel's; kernels/ort/conv_op.cpp. Other activations stay nodes.
OPERATORS = frozenset({"Conv", "ConvTranspose"})
ACTIVATIONS: tuple[Activation, ...] = ("none", "relu", "silu", "relu6")
_FEWEST_CHANNELS = 16  # of a depthwise convolution
_MOST_CELLS = 1.6  # for each pixel of an image that is upsampled


@dataclass(frozen=True, slots=True)
class Convolution:
    """A Conv of the main graph over sequences or images [batch, channels, …], by the initializer ``weight``, [n, …].

    ``pad`` is a Pad before it that the kernel does too.
    """

    node: ir.Node
    weight: ir.Value
    groups: int
    depthwise: bool
    pad: ir.Node | None

    @property
    def x(self) -> ir.Value | None:
        return (self.pad or self.node).inputs[0]

    @property
    def panelled(self) -> bool:
        """Whether the weight is stored in panels."""
        return not self.depthwise

    @property
    def channels(self) -> int:
        return const_dims(self.weight)[1] * self.groups

    @property
    def n(self) -> int:
        return const_dims(self.weight)[0]

    @property
    def k(self) -> int:
        """The number of terms of a sum."""
        return math.prod(self.kernel_shape) * self.channels // self.groups

    @property
    def kernel_shape(self) -> list[int]:
        return [*const_dims(self.weight)[2:]]

    def windows(self) -> dict[str, list[int]]:
        """Return the attributes that say which windows are multiplied, all of them written out."""
        given, rank = self.node.attributes, len(self.kernel_shape)
        pads = _pads(self.node) or [0] * 2 * rank
        if self.pad is not None:
            pads = [a + b for a, b in zip(pads, zeros_added(self.pad) or pads, strict=True)]
        return {
            "kernel_shape": self.kernel_shape,
            "strides": [*given.get_ints("strides", [1] * rank)],
            "dilations": [*given.get_ints("dilations", [1] * rank)],
            "pads": pads,
        }


@dataclass(frozen=True, slots=True)
class Upsampling(Convolution):
    """A ConvTranspose by ``weight``, [channels, …], as the dense convolution that computes a ``cell`` for each pixel.

    ``cut`` is what is then cut off, as pads (:mod:`bf16kit.converter.fuse.upsample`).
    """

    cell: tuple[int, ...]
    cut: tuple[int, ...]

    @property
    def panelled(self) -> bool:
        return False

    @property
    def channels(self) -> int:
        return const_dims(self.weight)[0]

    @property
    def n(self) -> int:
        return math.prod(self.cell) * const_dims(self.weight)[1]

    @property
    def kernel_shape(self) -> list[int]:
        return [size // each for size, each in zip(const_dims(self.weight)[2:], self.cell, strict=True)]

    def windows(self) -> dict[str, list[int]]:
        ones = [1] * len(self.cell)
        pads = [size - 1 for size in self.kernel_shape]
        return {"kernel_shape": self.kernel_shape, "strides": ones, "dilations": ones, "pads": pads * 2}


def convolution(node: ir.Node, narrow: Collection[str]) -> Convolution | None:
    """Return the convolution that ``node`` computes, if the kernel can; ``narrow`` names what is stored in bf16.

    Left out are padding that depends on an unknown size, three dimensions, weights that other nodes read too, and
    single pixels, which are products. Requires: types and shapes are known.
    """
    if node.op_type not in OPERATORS or node.domain != "" or product(node, narrow) is not None:
        return None
    x, weight = node.inputs[:2]
    if x is None or x.dtype != ir.DataType.FLOAT or weight is None or weight.name not in narrow or x.is_initializer():
        return None
    shape, given = const_dims(weight), node.attributes
    group, bias = given.get_int("group", 1), node.inputs[2] if len(node.inputs) > 2 else None
    fits = len(shape) in (3, 4) and 0 not in shape and len(weight.uses()) == 1 and not weight.is_graph_output()
    if fits and node.op_type == "ConvTranspose":
        return _upsampling(node, weight) if bias is None or takes_bias(bias, shape[1]) else None
    if not fits or min(_pads(node) or [-1]) < 0 or (bias is not None and not takes_bias(bias, shape[0])):
        return None
    depthwise = group == shape[0] >= _FEWEST_CHANNELS and shape[1] == 1
    before = x.producer()
    pad = before if before is not None and only_reader(x) is node and zeros_added(before) is not None else None
    return Convolution(node, weight, group, depthwise, pad)


def _upsampling(node: ir.Node, weight: ir.Value) -> Upsampling | None:
    """Return the ConvTranspose ``node``, if its window is a multiple of its stride, and its columns fill panels.

    The width of an image must be known, because the cells of a line are put side by side by a Reshape. Left out are
    images so small that most cells would be at their borders.
    """
    given, window, x = node.attributes, const_dims(weight)[2:], known_shape(node.inputs[0])
    ones, zeros = [1] * len(window), [0] * len(window)
    cell = tuple(given.get_ints("strides", ones))
    pads, more = given.get_ints("pads", zeros * 2), given.get_ints("output_padding", zeros)
    cut = (*pads[: len(window)], *(a - b for a, b in zip(pads[len(window) :], more, strict=True)))
    plain = given.get_string("auto_pad", "NOTSET") == "NOTSET" and "output_shape" not in given
    dense = given.get_int("group", 1) == max(given.get_ints("dilations", ones)) == 1
    known = len(window) == 1 or (x is not None and isinstance(x[-1], int))
    fits = not any(size % each for size, each in zip(window, cell, strict=True)) and min(cut) >= 0
    found = Upsampling(node, weight, 1, False, None, cell, cut)
    sizes = [(i, k) for i, k in zip(() if x is None else x[2:], found.kernel_shape, strict=False) if isinstance(i, int)]
    small = math.prod(i + k - 1 for i, k in sizes) > _MOST_CELLS * math.prod(i for i, _ in sizes)
    return found if plain and dense and known and fits and not small and found.n % WIDTH == 0 else None


def _pads(node: ir.Node) -> list[int] | None:
    """Return the zeros before and behind the image of the Conv ``node``; None if unknown, or if it crops the image.

    With SAME, the result has ⌈size ÷ stride⌉ pixels, and an odd zero is behind (UPPER) or before (LOWER) the image.
    """
    given, window = node.attributes, const_dims(node.inputs[1])[2:]
    mode, ones = given.get_string("auto_pad", "NOTSET"), [1] * len(window)
    if mode in ("NOTSET", "VALID"):
        return [*given.get_ints("pads", [0] * 2 * len(window))] if mode == "NOTSET" else [0] * 2 * len(window)
    strides, x = given.get_ints("strides", ones), known_shape(node.inputs[0])
    if max(given.get_ints("dilations", ones)) > 1:  # ONNX Runtime has none either
        return None
    totals: list[int] = []
    for k, stride, size in zip(window, strides, ones if x is None else x[2:], strict=True):
        if stride > 1 and (x is None or not isinstance(size, int)):
            return None
        # With stride 1 the size cancels out.
        left = size - (math.ceil(size / stride) - 1) * stride if isinstance(size, int) else 1
        totals.append(k - left)
    if min(totals) < 0:  # strides that leave pixels out: ONNX Runtime then crops the image on both sides
        return None
    halves = [total // 2 for total in totals]
    others = [total - half for total, half in zip(totals, halves, strict=True)]
    return [*halves, *others] if mode == "SAME_UPPER" else [*others, *halves]


def zeros_added(node: ir.Node) -> list[int] | None:
    """Return how many zeros the Pad ``node`` adds to an image, before and behind, as a Conv's pads; None if others."""
    if node.op_type != "Pad" or node.domain != "" or node.attributes.get_string("mode", "constant") != "constant":
        return None
    given = const(node.inputs[1]) if len(node.inputs) > 1 else None
    other = node.inputs[2] if len(node.inputs) > 2 else None
    if given is None or len(node.inputs) > 3 or (other is not None and constant_number(other, rank=1) != 0):
        return None
    before, behind = given.numpy().reshape(2, -1).tolist()
    return None if any(before[:2] + behind[:2]) or min(before + behind) < 0 else before[2:] + behind[2:]


def convolve(fusing: Fusing, node: ir.Node) -> Fusion | None:
    """Replace the Conv ``node`` by ``bf16kit::Conv…`` between two Transposes; None if it is none of ``fusing.images``.

    The kernel's node keeps the Conv's name. Its activation is computed by the kernel too, if it has it.
    """
    found = convolution(node, fusing.narrow) if node.name in fusing.images else None
    if found is None or (found.panelled and found.weight.name not in fusing.panels):
        return None
    name, activated, after = node.outputs[0], *activation(node.outputs[0])
    if activated not in ACTIVATIONS:
        activated, after = "none", ()
    result = after[-1].outputs[0] if after else name
    weight, bias = found.weight, node.inputs[2] if len(node.inputs) > 2 else _zeros(fusing, found)
    if isinstance(found, Upsampling):
        weight = upsample.panels(fusing, node, found.cell)
        bias = upsample.bias(fusing, node, found.cell) if len(node.inputs) > 2 else bias
    sizes: dict[str, Any] = {"channels": found.channels, "n": found.n, **found.windows()}
    rank, image, last = len(found.kernel_shape), result.shape, None if found.x is None else found.x.shape
    sizes["inward"], sizes["outward"] = [0, *range(2, rank + 2), 1], [0, rank + 1, *range(1, rank + 1)]
    if not found.depthwise:
        sizes |= {"group": found.groups, "window": [found.n, *found.kernel_shape, found.channels // found.groups]}
        sizes |= panel_shapes(found.k, found.n)
    function = _function(found, activated, sizes, fusing.opset, rounds=node.name in fusing.rounding)
    x = _transposed(fusing, found.x, node, sizes["inward"], last)
    made = fusing.operator(function, [x, weight, bias], sizes, node, node.name)
    made.outputs[0].name, made.outputs[0].type = fusing.fresh(f"{node.name}/image"), result.type
    shape = None if image is None else ir.Shape([image[axis] for axis in sizes["inward"]])
    y = made.outputs[0]
    if isinstance(found, Upsampling):
        y = upsample.put_together(fusing, node, y, found.cell, found.cut)
    y.shape = shape
    y = _transposed(fusing, y, node, sizes["outward"], shape)
    kind: Kind = "depthwise" if found.depthwise else "convolution"
    nodes = [each for each in (found.pad, node, *after) if each is not None]
    return fusing.replace(kind, node, nodes, made, {result: y})


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
        body, group = MATRICES[form].format(s=""), ", group: int = @group"
        steps = "Transpose <perm = [1, 0]> (#)", "Reshape (#, window)", "Transpose <perm: ints = @outward> (#)"
        body += chain("M", "C", *steps, "Cast <to = 1> (#)")
    body += chain("X", "I", *(ROUNDED if rounds else ()), "Transpose <perm: ints = @outward> (#)")
    body += f"O = Conv <{windows}{group}> (I, C, B) "
    body += chain("O", "Z" if FUNCTIONS[activated] else "Y", "Transpose <perm: ints = @inward> (#)")
    op_type = "_".join([stem, *([] if activated == "none" else [activated])])
    return define(op_type, ["X", "W", "B"], ["Y"], sizes, opset, body + FUNCTIONS[activated])
