"""Replaces products by weights stored in bf16, with the bias and the activation after them, by bf16kit's CPU kernel.

Products that read the same activations are joined into one node: waking the threads costs 20 µs per node. Look-ups in a
table that is stored in panels are replaced too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from bf16kit.converter.fuse.activations import FUNCTIONS, Activation, activation
from bf16kit.converter.fuse.functions import (
    ROUNDED,
    Fusing,
    Fusion,
    chain,
    define,
    panel_form,
    panel_shapes,
    rounds_activations,
)
from bf16kit.converter.fuse.products import Layout, Product, gathers_rows, product, readers, takes_bias
from bf16kit.converter.graph.initializers import const_dims, initializer, only_reader
from bf16kit.runtime.ort.kernel import DOMAIN

_FLOAT, _INT64 = ir.DataType.FLOAT, ir.DataType.INT64
_MOST = 3  # products in one node
_JOINABLE = frozenset({"MatMul_panels", "MatMul_panels_bias", "MatMulBf16_panels", "MatMulBf16_panels_bias"})
# How a function makes M, the matrix [k, n], of W, by the form of the weight.
MATRICES = {
    "panels": (
        "A{s} = Reshape (W{s}, panels{s}) T{s} = Transpose <perm = [1, 0, 2]> (A{s}) M{s} = Reshape (T{s}, matrix{s}) "
    ),
    "panels_narrow": "M{s} = Reshape (W{s}, matrix{s}) ",
    "panels_tail": (
        "F{s}, L{s} = Split <axis = 0> (W{s}, parts{s}) A{s} = Reshape (F{s}, panels{s})"
        " T{s} = Transpose <perm = [1, 0, 2]> (A{s}) H{s} = Reshape (T{s}, whole{s}) R{s} = Reshape (L{s}, tail{s})"
        " M{s} = Concat <axis = 1> (H{s}, R{s}) "
    ),
    "transposed": "M{s} = Transpose <perm = [1, 0]> (W{s}) ",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductVariant:
    """One variant of the kernel's product, of x [..., k] and a weight for each of ``columns``: [k, n] or [n, k].

    With ``rounds``, x is rounded to bf16 before the product. Several products have no activation.
    """

    layout: Layout = "panels"
    k: int
    columns: tuple[int, ...]
    bias: bool
    activation: Activation = "none"
    rounds: bool

    @property
    def op_type(self) -> str:
        """The operator's name, as ``MatMul_panels_tail_bias_relu``; kernels/ort/operators.cpp registers them all."""
        count = str(len(self.columns)) if len(self.columns) > 1 else ""
        parts = [f"MatMul{count}{'Bf16' if self.rounds else ''}", self._form(self.columns[0]), *["bias"][: self.bias]]
        return "_".join([*parts, *([] if self.activation == "none" else [self.activation])])

    def _form(self, n: int) -> str:
        return panel_form(n) if self.layout == "panels" else self.layout

    @property
    def _suffixes(self) -> list[str]:
        return [str(place) for place in range(1, len(self.columns) + 1)] if len(self.columns) > 1 else [""]

    def attributes(self) -> dict[str, int | str | list[int]]:
        """Return a node's attributes: ``k``, ``n``, or ``n1`` and so on, and lists that only the function reads."""
        found: dict[str, int | str | list[int]] = {"k": self.k}
        for suffix, n in zip(self._suffixes, self.columns, strict=True):
            found[f"n{suffix}"] = n
            if not suffix:
                found |= {"layout": self.layout, "activation": self.activation}
            lists = panel_shapes(self.k, n) if self.layout == "panels" else {}
            found |= {f"{name}{suffix}": sizes for name, sizes in lists.items()}
        return found

    def function(self, opset: int) -> ir.Function:
        """Return the function: X [..., k], the weights W (k·n in panels, or [n, k]), the biases B [n] → Y [..., n]."""
        body, rows = (chain("X", "rows", *ROUNDED), "rows") if self.rounds else ("", "X")
        activated = "Z" if FUNCTIONS[self.activation] else "Y"
        for s, n in zip(self._suffixes, self.columns, strict=True):
            body += MATRICES[self._form(n)].format(s=s)
            product = f"P{s}" if self.bias else f"{activated}{s}"
            body += f"C{s} = Cast <to = 1> (M{s}) {product} = MatMul ({rows}, C{s}) "
            body += f"{activated}{s} = Add (P{s}, B{s}) " if self.bias else ""
        inputs = ["X", *(f"{name}{s}" for name in ("WB" if self.bias else "W") for s in self._suffixes)]
        outputs, body = [f"Y{s}" for s in self._suffixes], body + FUNCTIONS[self.activation]
        return define(self.op_type, inputs, outputs, self.attributes(), opset, body)


def multiply(fusing: Fusing, node: ir.Node) -> Fusion | None:
    """Replace the product ``node`` by ``bf16kit::MatMul_…``; None if the kernel cannot compute it.

    A product that is to round its activations becomes ``bf16kit::MatMulBf16_…``. The kernel's node keeps the product's
    name, and its output that of the last node that it stands for. A product stays if a refused node reads its weight
    too: stored in panels, a weight is read either by the kernel alone or, put together, by others.
    """
    found = product(node, fusing.narrow)
    layout = None if found is None else found.layout(fusing.panels)
    if found is None or layout is None or _read_by_refused(fusing, found.weight):
        return None
    after, n, pixel, rounds = epilogue(found), found.n, node.op_type == "Conv", node.name in fusing.rounding
    biases = [] if after.bias is None else [after.bias]
    variant = ProductVariant(
        layout=layout, k=found.k, columns=(n,), bias=bool(biases), activation=after.activation, rounds=rounds
    )
    if layout == "transposed":  # the shape that the weight has in its file; a Conv's has more dimensions
        found.weight.shape = ir.Shape((n, found.k))
    inputs = [_rows(fusing, found) if pixel else node.inputs[0], found.weight, *biases]
    made = fusing.operator(variant.function(fusing.opset), inputs, variant.attributes(), node, node.name)
    result = output = made.outputs[0]
    if pixel or after.reshape is not None:  # the output is a value that the graph did not have
        output.name, output.type = fusing.fresh(f"{node.name}/product"), node.outputs[0].type
        output.shape = ir.Shape(((node.outputs[0].shape or [None])[0], n)) if pixel else node.outputs[0].shape
    if pixel:
        result = _image(fusing, found, output)
    if after.reshape is not None:  # it stays, and gives the activation's result
        after.reshape.replace_input_with(0, result)
        result = after.reshape.outputs[0]
    return fusing.replace("product", node, (node, *after.nodes), made, {after.result: result})


def _read_by_refused(fusing: Fusing, weight: ir.Value) -> bool:
    return any(reader.name in fusing.refused for reader in readers(weight))


def _rows(fusing: Fusing, found: Product) -> ir.Value:
    """Return the single pixels of a Conv, one row each."""
    flat = ir.node("Flatten", [found.node.inputs[0]], attributes={"axis": 1})
    shape = (found.node.outputs[0].shape or [None])[0], found.k
    return fusing.insert(flat, found.node, f"{found.node.name}/flatten", found.node.outputs[0].type, shape)


def _image(fusing: Fusing, found: Product, rows: ir.Value) -> ir.Value:
    """Return rows as images of a single pixel."""
    spatial = list(range(2, len(const_dims(found.weight))))
    axes = initializer(fusing.graph, fusing.fresh(f"{found.node.name}/axes"), ir.tensor(spatial))
    node = ir.node("Unsqueeze", [rows, axes])
    return fusing.insert(node, found.node, f"{found.node.name}/unsqueeze", rows.type, found.node.outputs[0].shape)


# --- what follows a product -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Epilogue:
    """The ``nodes`` after a product, in order, which are not needed if the kernel does their work.

    ``bias`` is an initializer of one number per column. ``result`` is the output of the last of product and nodes.
    ``reshape`` is a Reshape between bias and activation; it stays, after the kernel's node. GPT-2 has one: it
    multiplies matrices and activates batches.
    """

    bias: ir.Value | None
    activation: Activation
    nodes: tuple[ir.Node, ...]
    result: ir.Value
    reshape: ir.Node | None = None


def epilogue(product: Product) -> Epilogue:
    """Return the longest epilogue of ``product``: the nodes up to the first value that others read too."""
    result, bias = product.node.outputs[0], product.bias
    nodes: list[ir.Node] = []
    add = None if bias is not None or product.node.op_type == "Conv" else only_reader(result)
    added = next((v for v in add.inputs if takes_bias(v, product.n)), None) if add and add.op_type == "Add" else None
    if add is not None and added is not None:
        bias, result = added, add.outputs[0]
        nodes.append(add)
    reshape = None
    function, activated = activation(result)
    moving = None if activated else only_reader(result)
    if moving is not None and moving.op_type == "Reshape" and moving.inputs[0] is result:
        function, activated = activation(moving.outputs[0])
        reshape = moving if activated else None
    if activated:
        result = activated[-1].outputs[0]
    return Epilogue(bias, function, (*nodes, *activated), result, reshape)


# --- products of the same activations ---------------------------------------------------------------------------------


def groups(graph: ir.Graph) -> list[list[ir.Node]]:
    """Return the products that may be joined, two or three at a time, by what they read; in graph order.

    Not joined: products with an activation, or with a weight that is not in whole panels.
    """
    alike: dict[tuple[ir.Value | None, str], list[ir.Node]] = {}
    for node in graph:
        if node.domain == DOMAIN and node.op_type in _JOINABLE:
            alike.setdefault((node.inputs[0], node.op_type), []).append(node)
    found = [nodes[first : first + _MOST] for nodes in alike.values() for first in range(0, len(nodes), _MOST)]
    return [group for group in found if len(group) > 1]


def join(fusing: Fusing, group: Sequence[ir.Node]) -> None:
    """Replace ``group``, such as query, key and value, by one node in the first one's place, under its name.

    Its outputs take the names of the products' outputs.
    """
    first = group[0]
    variant = ProductVariant(
        k=first.attributes["k"].as_int(),
        columns=tuple(node.attributes["n"].as_int() for node in group),
        bias=len(first.inputs) > 2,
        rounds=rounds_activations(first.op_type),
    )
    inputs = [first.inputs[0], *(node.inputs[place] for place in range(1, len(first.inputs)) for node in group)]
    function, sizes = variant.function(fusing.opset), variant.attributes()
    made = fusing.operator(function, inputs, sizes, first, first.name, outputs=len(group))
    replaced = {node.outputs[0]: output for node, output in zip(group, made.outputs, strict=True)}
    fusing.replace("product", first, group, made, replaced)


# --- look-ups ---------------------------------------------------------------------------------------------------------


def look_up(fusing: Fusing, node: ir.Node) -> Fusion | None:
    """Replace the Gather ``node`` of rows of a matrix [n, k] in panels by ``bf16kit::Gather_panels``; else return None.

    The kernel's node keeps the Gather's name, and its output the Gather's: rows widened to fp32. Indices that are not
    int64 are cast. A table that a refused node reads stays, as in :func:`multiply`.
    """
    table, indices = (node.inputs[0], node.inputs[1]) if gathers_rows(node) else (None, None)
    if table is None or fusing.panels.get(table.name or "") != 0 or _read_by_refused(fusing, table):
        return None
    n, k = const_dims(table)
    if indices is not None and indices.dtype != _INT64:
        cast = ir.node("Cast", [indices], {"to": int(_INT64)})
        indices = fusing.insert(cast, node, f"{node.name}/indices", ir.TensorType(_INT64), indices.shape)
    sizes = {"k": k, "n": n, **panel_shapes(k, n)}
    made = fusing.operator(_lookup_function(n, sizes, fusing.opset), [indices, table], sizes, node, node.name)
    return fusing.replace("lookup", node, [node], made, {node.outputs[0]: made.outputs[0]})


def _lookup_function(n: int, sizes: dict[str, Any], opset: int) -> ir.Function:
    """Return the function I int64 [...], from -n to n - 1, W (k·n in panels) → Y [..., k].

    Rows are looked up before they are widened, so that the table which ONNX Runtime folds at load is bf16.
    kernels/ort/operators.cpp has an operator for each form of panels.
    """
    form = panel_form(n)
    body = MATRICES[form].format(s="")
    body += chain("M", "Y", "Transpose <perm = [1, 0]> (#)", "Gather <axis = 0> (#, I)", "Cast <to = 1> (#)")
    return define(f"Gather_{form}", ["I", "W"], ["Y"], sizes, opset, body)
