"""Where a tensor is stored: inside the graph's file, or once for all graphs in a weights file beside it; its blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

INLINE_FLOAT_BYTES = 64
INLINE_OTHER_BYTES = 1024
_BLOCK = 8 << 20  # bytes: several blocks are small beside any other memory of a conversion


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


class Computed(ir.LazyTensor):
    """An fp32 tensor of ``like``'s shape, computed each time it is read, whole or a block of rows at a time.

    ``compute(rows)`` gives the rows of a slice along the first axis; of a scalar, the scalar.
    """

    def __init__(self, compute: Callable[[slice], NDArray[np.float32]], like: ir.TensorProtocol) -> None:
        super().__init__(
            lambda: ir.tensor(compute(slice(None))), dtype=ir.DataType.FLOAT, shape=ir.Shape(dims(like)), name=like.name
        )
        self.rows = compute


def rows_of(array: NDArray[Any], rows: slice) -> NDArray[Any]:
    """Some rows of ``array``; of a scalar, which has none, itself."""
    return array[rows] if array.ndim else array


def reader(tensor: ir.TensorProtocol) -> Callable[[slice], NDArray[Any]]:
    """What gives some rows of ``tensor``, of a scalar itself: of one that is computed no others are computed for it."""
    if isinstance(tensor, Computed):
        return tensor.rows
    array = tensor.numpy()
    return lambda rows: rows_of(array, rows)


def blocks(tensor: ir.TensorProtocol) -> Iterator[tuple[slice, NDArray[Any]]]:
    """``tensor`` in order, as rows of its first axis of about :data:`_BLOCK` bytes: which, and a C-contiguous array.

    What is stored contiguously is a view: of a file that is mapped, nothing is read before it is used.
    """
    shape = dims(tensor)
    read = reader(tensor)
    step = max(1, _BLOCK // max(1, tensor.nbytes // max(1, shape[0]))) if shape else 1
    for start in range(0, shape[0] if shape else 1, step):
        rows = slice(start, start + step)
        yield rows, np.asarray(read(rows), order="C")


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


def const_dims(value: ir.Value | None) -> tuple[int, ...]:
    """The shape of the tensor behind an initializer; () for anything computed or fed, as for a scalar."""
    tensor = const(value)
    return () if tensor is None else dims(tensor)
