"""Chooses the convolutions that bf16kit's CPU kernel computes: those in regions that it makes faster.

Only the borders of a region are transposed (:mod:`bf16kit.converter.fuse.convolve`). A region is left to ONNX Runtime
if its borders are large beside its arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

import onnx_ir as ir

from bf16kit.converter.fuse.bottleneck import bottlenecks
from bf16kit.converter.fuse.convolve import OPERATORS, Convolution, convolution
from bf16kit.converter.fuse.functions import Fusing

# The smallest convolution, or group of one, that is faster than ONNX Runtime's: a tile has 32 columns, and sums as
# short as in a model's first layers take less time than what surrounds them.
_LEAST_K, _LEAST_N = 32, 32
# Operators, most of them elementwise, through which ONNX Runtime moves a Transpose (held by a test).
_TRANSPARENT = frozenset({"Add", "Clip", "Div", "HardSigmoid", "HardSwish", "LeakyRelu", "Mul", "Pad", "Relu"})
_TRANSPARENT |= {"Sigmoid", "Sub", "Tanh"}
MEANS = frozenset({"GlobalAveragePool", "ReduceMean"})  # whose lines ONNX Runtime averages with channels last
# Multiplications for each element that is transposed at a border, at least: then borders take at most 6 % of the time.
_WORTH = 200
_PIXELS = 56  # what an unknown height or width is taken for: only the ratio of arithmetic and borders depends on it


def worthwhile(fusing: Fusing) -> list[Convolution]:
    """Return the convolutions for the kernel: those in regions whose borders are small beside their arithmetic.

    A region is what convolutions and elementwise nodes connect; it begins with dense ones.
    """
    possible = {n: each for n in fusing.at(fusing.graph) if (each := convolution(n, fusing.narrow)) is not None}
    blocks = {each.node for three in bottlenecks(possible.values()) for each in three}
    found = {node: each for node, each in possible.items() if node in blocks or _pays(each)}
    for node in [node for node in found if found[node].depthwise]:  # in the order of the graph
        if source(found[node].x) not in found:
            del found[node]
    chosen: list[Convolution] = []
    seen = set[ir.Node]()
    for start in fusing.at(found):
        if start not in seen:
            region = _region(start, found)
            seen |= region
            inside = [each for node, each in found.items() if node in region]
            if sum(map(_multiplications, inside)) >= _WORTH * sum(_elements(value) for value in _borders(region)):
                chosen += inside
    return chosen


def _pays(found: Convolution) -> bool:
    """Whether the kernel computes the convolution faster than ONNX Runtime, with channels last on both sides."""
    return found.depthwise or (found.n >= _LEAST_N * found.groups and found.k >= _LEAST_K)


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
    for value in (*node.inputs[: 1 if node.op_type in OPERATORS else None], *node.outputs):
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
    return _elements(found.node.outputs[0]) * found.k
