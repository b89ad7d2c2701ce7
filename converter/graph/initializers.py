"""Tensors of a graph, where they are stored and how they are read; and what nodes and values are known to be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

INLINE_FLOAT_BYTES = 64
INLINE_OTHER_BYTES = 1024
_BLOCK = 8 << 20  # bytes: several blocks are small beside the other memory of a conversion

Dim = int | ir.SymbolicDim


def stays_inline(tensor: ir.TensorProtocol) -> bool:
    """Whether ``tensor`` is written into the graph: scalars, a Resize's scales, shapes and axes.

    Shape inference, in ONNX and ONNX Runtime, reads such values and cannot read them from another file. Everything
    larger is external data, so that a graph's file never holds weights, however large the model.
    """
    if tensor.dtype == ir.DataType.STRING:
        return True
    if tensor.dtype.is_floating_point():
        return tensor.nbytes <= INLINE_FLOAT_BYTES
    return tensor.nbytes <= INLINE_OTHER_BYTES


def dims(tensor: ir.TensorProtocol) -> tuple[int, ...]:
    """Return the shape of a tensor; its dimensions are always numbers."""
    return tuple(int(size) for size in tensor.shape.numpy())


class ComputedTensor(ir.LazyTensor):
    """An fp32 tensor of ``like``'s shape, computed each time it is read, as a whole or a block of rows at a time.

    ``compute(rows)`` returns the rows of a slice along the first axis; for a scalar, the scalar.
    """

    def __init__(self, compute: Callable[[slice], NDArray[np.float32]], like: ir.TensorProtocol) -> None:
        super().__init__(
            lambda: ir.tensor(compute(slice(None))), dtype=ir.DataType.FLOAT, shape=ir.Shape(dims(like)), name=like.name
        )
        self.rows = compute


def rows_of(array: NDArray[Any], rows: slice) -> NDArray[Any]:
    """Return some rows of ``array``; a scalar, which has no rows, is returned itself."""
    return array[rows] if array.ndim else array


def reader(tensor: ir.TensorProtocol) -> Callable[[slice], NDArray[Any]]:
    """Return a function that reads rows of ``tensor``, or a scalar itself; a computed tensor computes only those."""
    if isinstance(tensor, ComputedTensor):
        return tensor.rows
    array = tensor.numpy()
    return lambda rows: rows_of(array, rows)


def blocks(tensor: ir.TensorProtocol) -> Iterator[tuple[slice, NDArray[Any]]]:
    """Yield ``tensor`` in order, in blocks of about :data:`_BLOCK` bytes: the rows, and a C-contiguous array.

    A block of a tensor stored contiguously is a view; of a mapped file, nothing is read before it is used.
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
    """Return the tensor of an initializer; None if ``value`` is computed or fed."""
    if value is None or not value.is_initializer():
        return None
    return value.const_value


def const_dims(value: ir.Value | None) -> tuple[int, ...]:
    """Return the shape of an initializer's tensor; () if ``value`` is computed or fed, as for a scalar."""
    tensor = const(value)
    return () if tensor is None else dims(tensor)


# --- nodes and values -------------------------------------------------------------------------------------------------


def is_onnx_operator(node: ir.Node) -> bool:
    """Whether ``node`` is one of ONNX's own operators."""
    return node.domain == ""


def constant_number(value: ir.Value | None, *, rank: int) -> float | None:
    """Return the number that ``value`` is: a constant of one element with at most ``rank`` dimensions; else None."""
    tensor = const(value)
    if tensor is None or tensor.size != 1 or not tensor.dtype.is_floating_point() or len(dims(tensor)) > rank:
        return None
    return float(tensor.numpy().reshape(()))


def known_shape(value: ir.Value | None) -> Sequence[Dim] | None:
    """Return the dimensions of ``value``, if their number is known."""
    return None if value is None or value.shape is None else value.shape.dims


def same_dim(a: Dim, b: Dim) -> bool:
    """Whether two dimensions are known to be equal."""
    if isinstance(a, int) or isinstance(b, int):
        return a == b
    return a.value is not None and a.value == b.value


def same_dims(a: ir.Value, b: ir.Value) -> bool:
    """Whether two values are known to have the same shape."""
    left, right = known_shape(a), known_shape(b)
    return left is not None and right is not None and len(left) == len(right) and all(map(same_dim, left, right))


def only_reader(value: ir.Value) -> ir.Node | None:
    """Return the only reader of ``value``, if it is one of ONNX's own nodes in the same graph and reads it once."""
    uses, producer = tuple(value.uses()), value.producer()
    if len(uses) != 1 or value.is_graph_output() or producer is None:
        return None
    node = uses[0].node
    return node if is_onnx_operator(node) and node.graph is producer.graph else None
