"""Clamps constants meant as "minus infinity" to bf16's range: fp32's lowest would round to −inf, and −inf to NaN."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bf16kit.converter.graph.initializers import ComputedTensor, reader
from bf16kit.converter.graph.operators import MOVEMENT, WEIGHTED
from bf16kit.numerics.rounding import LARGEST, OVERFLOW


def clamp_masks(model: ir.Model, clamped: set[str]) -> None:
    """Clamp finite fp32 constants that overflow in bf16 to bf16's largest magnitude, if they are masks.

    A mask is a constant that no operator reads as a weight: it is added, selected or compared. Weights out of range are
    an error, which is found when they are narrowed. Infinite constants stay, because their author meant them.
    ConstantOfShape is clamped too. ``clamped`` gets the names of the initializers that were changed.
    """
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is not None and not is_weight(value) and _overflows(tensor):
            value.const_value = _clamped(tensor)
            clamped.add(name)
    for node in model.graph.all_nodes():
        fill = node.attributes.get("value") if node.op_type == "ConstantOfShape" else None
        if fill is not None and _overflows(fill.as_tensor()):
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(_clamped(fill.as_tensor()).numpy()))


def _overflows(tensor: ir.TensorProtocol) -> bool:
    """Whether a finite fp32 value of ``tensor`` would round to an infinite bf16."""
    if tensor.dtype != ir.DataType.FLOAT or tensor.size == 0:
        return False
    array = tensor.numpy()
    if max(-float(array.min()), float(array.max())) < OVERFLOW:  # NaN is not: it is compared below
        return False
    magnitude = np.abs(array)
    return bool(np.any(np.isfinite(magnitude) & (magnitude >= np.float32(OVERFLOW))))


def is_weight(value: ir.Value) -> bool:
    """Whether an operator that takes weights reads ``value``, directly or after it was moved or cut.

    A table that Gather reads is a weight. A Gather after another movement does not count: it more likely looks up a
    mask by position.
    """
    readers, reached, waiting = WEIGHTED, {value}, [value]
    for each in waiting:  # which grows
        uses = [(use.node, use.idx) for use in each.uses()]
        if any(node.op_type in readers for node, _ in uses):
            return True
        readers = WEIGHTED - {"Gather"}
        moves = (node for node, index in uses if node.op_type in MOVEMENT and (index == 0 or node.op_type == "Concat"))
        moved = {output for node in moves for output in node.outputs} - reached
        reached |= moved
        waiting += moved
    return False


def _clamped(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    read = reader(tensor)

    def compute(rows: slice) -> NDArray[np.float32]:
        array = read(rows)
        return np.where(np.isinf(array), array, np.clip(array, np.float32(-LARGEST), np.float32(LARGEST)))

    return ComputedTensor(compute, like=tensor)
