"""What a transposed convolution is around a dense one, if its window is a multiple of its stride.

Its result is a grid of cells, each as large as the stride. A dense convolution computes a whole cell for each pixel, as
columns [cell, channels], by windows as many times smaller. The cells are then put side by side and their borders cut
off (docs/decisions/0088-convolutions.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from bf16kit.converter.fuse.functions import Fusing
from bf16kit.converter.graph.initializers import const_dims, known_shape
from bf16kit.numerics.panels import WIDTH


def panels(fusing: Fusing, node: ir.Node, cell: Sequence[int]) -> ir.Value:
    """Return the weight [k, n] of the dense convolution in panels, made of that of the ConvTranspose ``node`` at load.

    Rows are windows [*window ÷ cell, channels], whose pixels are in the opposite order. Requires: n is in whole panels.
    """
    weight = node.inputs[1]
    channels, outputs, *window = const_dims(weight)
    steps = [size // each for size, each in zip(window, cell, strict=True)]
    pairs = [size for both in zip(steps, cell, strict=True) for size in both]
    value = _add(fusing, node, "Reshape", [weight, fusing.integers("constant", channels, outputs, *pairs)])
    for axis, count in zip(range(2, 2 + len(pairs), 2), steps, strict=True):
        if count > 1:
            backwards = fusing.integers("constant", *reversed(range(count)))
            value = _add(fusing, node, "Gather", [value, backwards], axis=axis)
    order = [*range(2, 2 + len(pairs), 2), 0, *range(3, 3 + len(pairs), 2), 1]
    value = _add(fusing, node, "Transpose", [value], perm=order)
    k, n = math.prod(steps) * channels, math.prod(cell) * outputs
    value = _add(fusing, node, "Reshape", [value, fusing.integers("constant", k, n // WIDTH, WIDTH)])
    return _add(fusing, node, "Transpose", [value], perm=[1, 0, 2])


def bias(fusing: Fusing, node: ir.Node, cell: Sequence[int]) -> ir.Value:
    """Return the bias of a cell: that of ``node`` for each pixel of it."""
    return _add(fusing, node, "Concat", [node.inputs[2]] * math.prod(cell), axis=0)


def put_together(fusing: Fusing, node: ir.Node, cells: ir.Value, cell: Sequence[int], cut: Sequence[int]) -> ir.Value:
    """Return the image [batch, …, channels] that ``cells`` [batch, …, cell·channels] are, without its borders.

    ``cut`` is how many pixels are cut off before and behind it, as a Conv's pads. Requires: the width is known.
    """
    channels, (first, *across), window = const_dims(node.inputs[1])[1], cell, const_dims(node.inputs[1])[2:]
    sizes = (known_shape(node.inputs[0]) or (None,) * (len(cell) + 2))[2:]
    high, *wide = [
        size * each + length - each if isinstance(size, int) else -1
        for size, each, length in zip(sizes, cell, window, strict=True)
    ]
    value = cells
    if across:
        lines = fusing.integers("constant", 0, 0, 0, first, across[0] * channels)
        value = _add(fusing, node, "Reshape", [value, lines])
        value = _add(fusing, node, "Transpose", [value], perm=[0, 1, 3, 2, 4])
    value = _add(fusing, node, "Reshape", [value, fusing.integers("constant", 0, high, *wide, channels)])
    if any(cut):
        rank = len(cell)
        ends = [-size if size else np.iinfo(np.int64).max for size in cut[rank:]]
        bounds = cut[:rank], ends, range(1, rank + 1)
        value = _add(fusing, node, "Slice", [value, *(fusing.integers("constant", *each) for each in bounds)])
    return value


def _add(fusing: Fusing, node: ir.Node, op: str, inputs: Sequence[ir.Value | None], **attributes: Any) -> ir.Value:
    made = ir.node(op, inputs, attributes)
    return fusing.insert(made, node, f"{node.name}/{op.lower()}", ir.TensorType(ir.DataType.FLOAT), None)
