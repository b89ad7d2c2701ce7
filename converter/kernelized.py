"""Which products of a graph can run on bf16kit's CPU kernel, and which weights are stored as that kernel likes them.

The kernel multiplies fp32 rows by a constant weight stored in bf16 and accumulates in fp32. A weight that nothing but
such products reads is stored in panels (:mod:`bf16kit.panels`). A table that is looked up too keeps its rows; where it
holds one row per column of the product, as tied embeddings do, the kernel reads it so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from converter.storage import const, dims

_SWAPPED = [1, 0]


@dataclass(frozen=True, slots=True)
class Product:
    """A MatMul or Gemm, x·W plus C, of the main graph: ``weight`` is the initializer behind W.

    ``axis`` is the axis of ``weight`` that holds the columns of the product: 1 for [K, N], 0 for [N, K].
    """

    node: ir.Node
    weight: ir.Value
    axis: int

    @property
    def bias(self) -> ir.Value | None:
        """What a Gemm adds: an initializer of N values."""
        return self.node.inputs[2] if len(self.node.inputs) > 2 else None

    @property
    def k(self) -> int:
        return _dims(self.weight)[1 - self.axis]

    @property
    def n(self) -> int:
        return _dims(self.weight)[self.axis]


def products(model: ir.Model, narrow: Collection[str]) -> dict[ir.Node, Product]:
    """The products of the main graph that the kernel can compute, in graph order.

    ``narrow`` names the initializers stored in bf16. Left out: weights that are computed or not matrices, constant
    left-hand sides, and of Gemm a transposed left-hand side, factors other than 1, and a C that is computed or varies
    over anything but columns. Requires: types are known.
    """
    found = (_product(node, narrow) for node in model.graph)
    return {product.node: product for product in found if product is not None}


def panelled(model: ir.Model, narrow: Collection[str]) -> dict[str, int]:
    """The initializers to store in panels, each with the axis that holds the columns: see :class:`Product`.

    Every use of such a weight is a product, directly or through a transposition, and all agree on the axis.
    """
    readers = products(model, narrow)
    axes: dict[ir.Value, set[int]] = {}
    for product in readers.values():
        axes.setdefault(product.weight, set()).add(product.axis)
    return {
        weight.name or "": next(iter(found))
        for weight, found in axes.items()
        if len(found) == 1 and _only_multiplied(weight, readers)
    }


def takes_bias(value: ir.Value | None, columns: int) -> bool:
    """Whether ``value`` is a constant of one fp32 number per column: [N], or [1, 1, N] and the like."""
    tensor = const(value)
    if tensor is None or tensor.dtype != ir.DataType.FLOAT:
        return False
    shape = dims(tensor)
    return bool(shape) and shape[-1] == columns == tensor.size


def is_transposition(node: ir.Node | None) -> bool:
    """Whether ``node`` swaps the two axes of a matrix."""
    if node is None or node.op_type != "Transpose" or node.domain != "" or node.inputs[0] is None:
        return False
    order = node.attributes.get("perm")
    shape = node.inputs[0].shape
    return list(order.as_ints()) == _SWAPPED if order is not None else shape is not None and len(shape) == 2


def _product(node: ir.Node, narrow: Collection[str]) -> Product | None:
    if node.domain != "" or node.op_type not in ("MatMul", "Gemm"):
        return None
    left, right = node.inputs[0], node.inputs[1]
    if left is None or right is None or left.dtype != ir.DataType.FLOAT or left.is_initializer():
        return None
    axis, weight = 1, right
    transposition = right.producer()
    if transposition is not None and is_transposition(transposition) and transposition.inputs[0] is not None:
        axis, weight = 0, transposition.inputs[0]
    tensor = const(weight)
    if tensor is None or weight.name not in narrow or len(dims(tensor)) != 2 or 0 in dims(tensor):
        return None
    if node.op_type == "Gemm":
        if _integer(node, "transB", 0):
            axis = 1 - axis
        if not _plain(node, dims(tensor)[axis]):
            return None
    return Product(node, weight, axis)


def _plain(gemm: ir.Node, columns: int) -> bool:
    """Whether ``gemm`` is x·W, or that plus a bias."""
    if _integer(gemm, "transA", 0) or _number(gemm, "alpha", 1.0) != 1:
        return False
    added = gemm.inputs[2] if len(gemm.inputs) > 2 else None
    return added is None or (_number(gemm, "beta", 1.0) == 1 and takes_bias(added, columns))


def _only_multiplied(weight: ir.Value, readers: Mapping[ir.Node, Product]) -> bool:
    for node, position in weight.uses():
        if _multiplies(node, position, readers):
            continue
        if node.graph is None or not is_transposition(node) or node.outputs[0].is_graph_output():
            return False
        if not all(_multiplies(user, index, readers) for user, index in node.outputs[0].uses()):
            return False
    return not weight.is_graph_output()


def _multiplies(node: ir.Node, position: int, readers: Mapping[ir.Node, Product]) -> bool:
    return node in readers and position == 1


def _dims(weight: ir.Value) -> tuple[int, ...]:
    tensor = const(weight)
    return () if tensor is None else dims(tensor)


def _integer(node: ir.Node, name: str, default: int) -> int:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_int()


def _number(node: ir.Node, name: str, default: float) -> float:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_float()
