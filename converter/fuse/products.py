"""Finds the products of a graph that bf16kit's CPU kernel can run, and the weights that are stored in its panels.

The kernel multiplies fp32 rows by a constant weight stored in bf16 and accumulates in fp32. A weight that only such
products read is stored in panels (:mod:`bf16kit.numerics.panels`). So is a table that is also looked up, if it holds
one row per column of the product, as tied embeddings do. The kernel finds rows in panels. Any other weight keeps its
rows. The kernel reads it in that layout if the rows are the product's columns. 1×1 convolutions on a single pixel are
products too, and their weights are read in that layout.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir

from bf16kit.converter.fuse.functions import Fusing
from bf16kit.converter.graph.initializers import const, const_dims, dims

Layout = Literal["panels", "transposed"]

_SWAPPED = [1, 0]
# Products of fewer columns are left to ONNX Runtime: at 16 the kernel is slower in fp32 and as fast in bf16
# (docs/decisions/0090). The weight is small in fp32 too.
NARROWEST = 17


@dataclass(frozen=True, slots=True)
class Product:
    """A MatMul, Gemm or Conv of the main graph that computes x·W or x·W plus a bias; the initializer ``weight`` is W.

    ``axis`` is the axis of ``weight`` that holds the columns of the product: 1 for [K, N], 0 for [N, K] and for the
    [N, K, 1, …] of a Conv, whose x is [batch, K, 1, …].
    """

    node: ir.Node
    weight: ir.Value
    axis: int

    @property
    def bias(self) -> ir.Value | None:
        """The bias of a Gemm or Conv: an initializer of N values."""
        return self.node.inputs[2] if len(self.node.inputs) > 2 else None

    @property
    def k(self) -> int:
        return const_dims(self.weight)[1 - self.axis]

    @property
    def n(self) -> int:
        return const_dims(self.weight)[self.axis]

    def layout(self, panels: Collection[str]) -> Layout | None:
        """Return how the kernel reads the weight, given the names of the weights in ``panels``; None if it cannot."""
        if self.weight.name in panels:
            return "panels"
        return "transposed" if self.axis == 0 else None


def product(node: ir.Node, narrow: Collection[str]) -> Product | None:
    """Return the product that ``node`` computes, if the kernel can.

    ``narrow`` names the initializers stored in bf16. Left out are weights that are computed, are no matrices or have
    fewer than ``NARROWEST`` columns, and constant left-hand sides. So is a Gemm with a transposed left-hand side, with
    factors other than 1, or with a C that is computed or varies over anything but columns. A 1×1 Conv is included only
    for a single pixel, because others would need their pixels moved before their channels, and back.
    Requires: types are known.
    """
    if node.op_type not in ("MatMul", "Gemm", "Conv") or node.domain != "":
        return None
    left = node.inputs[0]
    if left is None or left.dtype != ir.DataType.FLOAT or left.is_initializer():
        return None
    found = _convolution(node) if node.op_type == "Conv" else _matrix_product(node)
    return found if found is not None and found.weight.name in narrow and found.n >= NARROWEST else None


def panelled_weights(fusing: Fusing) -> dict[str, int]:
    """Return the initializers to store in panels, each with the axis that holds the columns: see :class:`Product`.

    Every reader of such a weight is a product, directly or after a transposition, and all agree on the axis. If that
    axis holds the rows of the weight, look-ups may read it too. A table that is only looked up is not included.
    """
    products = {n: found for n in fusing.at(fusing.graph) if (found := product(n, fusing.narrow)) is not None}
    of_matrices = (products[n] for n in fusing.at(products) if len(const_dims(products[n].weight)) == 2)
    return {each.weight.name or "": each.axis for each in of_matrices if _only_kernel_reads(each, products)}


def readers(weight: ir.Value) -> Iterator[ir.Node]:
    """Yield the nodes that read ``weight``, directly or after a transposition."""
    for node, _ in weight.uses():
        yield from (use.node for use in node.outputs[0].uses()) if is_transposition(node) else (node,)


def gathers_rows(node: ir.Node) -> bool:
    """Whether ``node`` gathers along the first axis of a matrix."""
    return node.op_type == "Gather" and node.domain == "" and node.attributes.get_int("axis", 0) in (0, -2)


def takes_bias(value: ir.Value | None, columns: int) -> bool:
    """Whether ``value`` is a constant row [N] of one fp32 number per column."""
    tensor = const(value)
    return tensor is not None and tensor.dtype == ir.DataType.FLOAT and dims(tensor) == (columns,)


def is_transposition(node: ir.Node | None) -> bool:
    """Whether ``node`` swaps the two axes of a matrix."""
    if node is None or node.op_type != "Transpose" or node.domain != "" or node.inputs[0] is None:
        return False
    order, shape = node.attributes.get_ints("perm", None), node.inputs[0].shape
    return list(order) == _SWAPPED if order is not None else shape is not None and len(shape) == 2


def _matrix_product(node: ir.Node) -> Product | None:
    right = node.inputs[1]
    if right is None:
        return None
    axis, weight = 1, right
    transposition = right.producer()
    if transposition is not None and is_transposition(transposition) and transposition.inputs[0] is not None:
        axis, weight = 0, transposition.inputs[0]
    shape = const_dims(weight)
    if len(shape) != 2 or 0 in shape:
        return None
    if node.op_type == "Gemm" and node.attributes.get_int("transB", 0) != 0:
        axis = 1 - axis
    return Product(node, weight, axis) if node.op_type == "MatMul" or _plain(node, shape[axis]) else None


def _convolution(node: ir.Node) -> Product | None:
    """Match a Conv of one pixel by 1×1, such as in a squeeze-and-excite block: [batch, K, 1, 1] → [batch, N, 1, 1]."""
    source, weight = node.inputs[0], node.inputs[1]
    if source is None or source.shape is None or weight is None or len(weight.uses()) != 1:
        return None
    shape = const_dims(weight)
    pixels = [*source.shape[2:], *shape[2:]]
    padded = any(node.attributes.get_ints("pads", ()))
    if not pixels or any(size != 1 for size in pixels) or padded or 0 in shape or source.shape[1] != shape[1]:
        return None
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    return Product(node, weight, 0) if bias is None or takes_bias(bias, shape[0]) else None


def _plain(gemm: ir.Node, columns: int) -> bool:
    """Whether ``gemm`` computes x·W, or x·W plus a bias."""
    if gemm.attributes.get_int("transA", 0) or gemm.attributes.get_float("alpha", 1.0) != 1:
        return False
    added = gemm.inputs[2] if len(gemm.inputs) > 2 else None
    return added is None or (gemm.attributes.get_float("beta", 1.0) == 1 and takes_bias(added, columns))


def _only_kernel_reads(found: Product, products: Mapping[ir.Node, Product]) -> bool:
    """Whether only products with columns along the axis of ``found``, and the kernel's look-ups, read its weight."""
    multiplied = {(node, 1) for node, each in products.items() if each.axis == found.axis}
    for node, position in found.weight.uses():
        if (node, position) in multiplied:
            continue
        if found.axis == 0 and position == 0 and node.graph is found.weight.graph and gathers_rows(node):
            continue
        if node.graph is None or not is_transposition(node) or node.outputs[0].is_graph_output():
            return False
        if not all((user, index) in multiplied for user, index in node.outputs[0].uses()):
            return False
    return not found.weight.is_graph_output()
