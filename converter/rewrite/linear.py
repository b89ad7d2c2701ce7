"""The linear operator before a BatchNorm: its weight, its channel axis, its bias, and how to replace that."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from converter.graph.initializers import const, dims


@dataclass(frozen=True, slots=True)
class Linear:
    """A Conv, ConvTranspose, Gemm or MatMul whose weight is a constant that nothing else reads.

    ``bias`` has one float64 per output channel, in the units of the output (zeros if there is none). ``add`` is the Add
    that adds the bias of a MatMul, if any.
    """

    node: ir.Node
    weight: ir.Value
    tensor: ir.TensorProtocol
    axis: int
    bias: NDArray[np.float64]
    add: ir.Node | None = None

    @property
    def channels(self) -> int:
        return len(self.bias)

    @property
    def last(self) -> ir.Node:
        return self.add or self.node

    def replace_bias(self, bias: ir.Value) -> None:
        """Make the operator add ``bias``, one value per output channel, instead of its previous bias."""
        if self.node.op_type != "MatMul":
            self.node.resize_inputs(3)
            self.node.replace_input_with(2, bias)
            if self.node.op_type == "Gemm":
                self.node.attributes["beta"] = ir.AttrFloat32("beta", 1.0)
        elif self.add is not None:
            side = 0 if self.add.inputs[1] is self.node.outputs[0] else 1
            self.add.replace_input_with(side, bias)

    def replace_batchnorm(self, graph: ir.Graph, batchnorm: ir.Node) -> None:
        """Make the operator's output replace the BatchNorm's, under the BatchNorm's name, and remove the BatchNorm."""
        old = batchnorm.outputs[0]
        new = self.last.outputs[0]
        name, kind, shape = old.name, old.type, old.shape
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        graph.remove(batchnorm, safe=True)
        old.name = None
        new.name, new.type, new.shape = name, kind, shape


def linear_before(batchnorm: ir.Node) -> Linear | None:
    """Return the operator whose output only ``batchnorm`` reads, if BatchNorm can be folded into it."""
    source = batchnorm.inputs[0]
    node = None if source is None else source.producer()
    if source is None or node is None or node.domain != "" or not _only_use(source):
        return None
    if node.op_type == "Add":
        return _matmul_add(node)
    reader = {"Conv": _conv, "ConvTranspose": _conv_transpose, "Gemm": _gemm}.get(node.op_type)
    return None if reader is None else reader(node)


def _conv(node: ir.Node) -> Linear | None:
    return _with_bias(node, axis=0)


def _conv_transpose(node: ir.Node) -> Linear | None:
    """The weight is [in, out / groups, ...]: with groups, one index of axis 1 serves several output channels."""
    groups = node.attributes.get("group")
    return None if groups is not None and groups.as_int() != 1 else _with_bias(node, axis=1)


def _gemm(node: ir.Node) -> Linear | None:
    """Y = alpha·A·B + beta·C: alpha commutes with the scale, beta goes into the bias."""
    transposed = node.attributes.get("transB")
    beta = node.attributes.get("beta")
    axis = 0 if transposed is not None and transposed.as_int() else 1
    return _with_bias(node, axis=axis, factor=1.0 if beta is None else beta.as_float())


def _matmul_add(add: ir.Node) -> Linear | None:
    for index in (0, 1):
        product = add.inputs[index]
        node = None if product is None else product.producer()
        if product is None or node is None or node.op_type != "MatMul" or node.domain != "" or not _only_use(product):
            continue
        # BatchNorm's channels are axis 1, a MatMul's are its last axis: the same only for matrices
        if product.shape is None or len(product.shape) != 2 or len(node.inputs) != 2:
            return None
        weight = _weight(node)
        if weight is None or len(dims(weight[1])) != 2:
            return None
        bias = _bias(add.inputs[1 - index], dims(weight[1])[1])
        return None if bias is None else Linear(node, weight[0], weight[1], 1, bias, add)
    return None


def _with_bias(node: ir.Node, *, axis: int, factor: float = 1.0) -> Linear | None:
    weight = _weight(node)
    if weight is None or len(dims(weight[1])) <= axis:
        return None
    bias = _bias(node.inputs[2] if len(node.inputs) > 2 else None, dims(weight[1])[axis])
    return None if bias is None else Linear(node, weight[0], weight[1], axis, bias * factor)


def _weight(node: ir.Node) -> tuple[ir.Value, ir.TensorProtocol] | None:
    value = node.inputs[1]
    tensor = const(value)
    if value is None or tensor is None or tensor.dtype != ir.DataType.FLOAT or not _only_use(value):
        return None
    return value, tensor


def _bias(value: ir.Value | None, channels: int) -> NDArray[np.float64] | None:
    """Return a constant bias as one float64 per channel; None if it is computed or varies along another axis."""
    if value is None:
        return np.zeros(channels)
    tensor = const(value)
    if tensor is None or tensor.dtype != ir.DataType.FLOAT:
        return None
    array = tensor.numpy().astype(np.float64)
    if array.size == 1:
        return np.full(channels, array.reshape(()))
    return array.reshape(-1) if array.shape[-1] == channels == array.size else None


def _only_use(value: ir.Value) -> bool:
    return len(value.uses()) == 1 and not value.is_graph_output()
