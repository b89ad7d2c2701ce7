"""Where a tensor is stored: inside the graph's file, or once for all graphs in a weights file beside it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

INLINE_FLOAT_BYTES = 64
INLINE_OTHER_BYTES = 1024


def stays_inline(tensor: ir.TensorProtocol) -> bool:
    """Whether ``tensor`` is written into the graph: scalars, a Resize's scales, shapes and axes.

    Shape inference, ONNX's and ONNX Runtime's, reads such values and cannot follow them into another file. Everything
    larger is external data, so that a graph's file never holds weights, however large the model.
    """
    if tensor.dtype == ir.DataType.STRING:
        return True
    if tensor.dtype.is_floating_point():
        return tensor.nbytes <= INLINE_FLOAT_BYTES
    return tensor.nbytes <= INLINE_OTHER_BYTES


def dims(tensor: ir.TensorProtocol) -> tuple[int, ...]:
    """The shape of a tensor, whose dimensions are always numbers."""
    return tuple(int(size) for size in tensor.shape.numpy())


def lazy(compute: Callable[[], NDArray[np.float32]], like: ir.TensorProtocol) -> ir.TensorProtocol:
    """An fp32 tensor of ``like``'s shape that is computed each time it is read, so that only one is ever in memory."""
    return ir.LazyTensor(
        lambda: ir.tensor(compute()), dtype=ir.DataType.FLOAT, shape=ir.Shape(dims(like)), name=like.name
    )


def initializer(graph: ir.Graph, name: str, tensor: ir.TensorProtocol) -> ir.Value:
    """Register ``tensor`` as a new initializer of ``graph``, with its type and shape."""
    value = ir.Value(name=name, shape=ir.Shape(dims(tensor)), type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def const(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor behind an initializer; None for anything computed or fed."""
    if value is None or not value.is_initializer():
        return None
    return value.const_value
