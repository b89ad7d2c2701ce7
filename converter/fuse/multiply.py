"""Replaces products by weights stored in bf16, with the bias and the activation after them, by bf16kit's CPU kernel.

Products that read the same activations are joined into one node: waking the threads costs 20 µs per node. Look-ups in a
table that is stored in panels are replaced too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from bf16kit.runtime.ort.kernel import DOMAIN
from converter.fuse.activations import Activation, activation, apply
from converter.fuse.functions import (
    FunctionBody,
    Fusing,
    Fusion,
    panel_form,
    panel_shapes,
    rounds_activations,
)
from converter.fuse.products import Layout, Product, gathers_rows, product, readers, takes_bias
from converter.graph.initializers import const, const_dims, dims, initializer, only_reader

_FLOAT, _INT64 = ir.DataType.FLOAT, ir.DataType.INT64
_MOST = 3  # products in one node
_JOINABLE = frozenset({"MatMul_panels", "MatMul_panels_bias", "MatMulBf16_panels", "MatMulBf16_panels_bias"})


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
        form = panel_form(self.columns[0]) if self.layout == "panels" else self.layout
        activation = [] if self.activation == "none" else [self.activation]
        return "_".join([f"MatMul{count}{'Bf16' if self.rounds else ''}", form, *["bias"][: self.bias], *activation])

    @property
    def _suffixes(self) -> list[str]:
        return [str(place) for place in range(1, len(self.columns) + 1)] if len(self.columns) > 1 else [""]

    def _lists(self, n: int) -> dict[str, list[int]]:
        return panel_shapes(self.k, n) if self.layout == "panels" else {}

    def attributes(self) -> dict[str, int | str | list[int]]:
        """Return a node's attributes: ``k``, ``n``, or ``n1`` and so on, and lists that only the function reads."""
        found: dict[str, int | str | list[int]] = {"k": self.k}
        for suffix, n in zip(self._suffixes, self.columns, strict=True):
            found[f"n{suffix}"] = n
            if not suffix:
                found |= {"layout": self.layout, "activation": self.activation}
            found |= {f"{name}{suffix}": sizes for name, sizes in self._lists(n).items()}
        return found

    def function(self, opset: int) -> ir.Function:
        """Return the function: X [..., k], the weights W (k·n in panels, or [n, k]), the biases B [n] → Y [..., n]."""
        x, suffixes = ir.Value(name="X"), self._suffixes
        weights = [ir.Value(name=f"W{suffix}") for suffix in suffixes]
        biases = [ir.Value(name=f"B{suffix}") for suffix in suffixes if self.bias]
        body, outputs = FunctionBody(opset), {}
        rows = body.rounded(x) if self.rounds else x
        for place, (suffix, weight, n) in enumerate(zip(suffixes, weights, self.columns, strict=True)):
            if self.layout == "transposed":
                matrix = body.add("Transpose", weight, perm=[1, 0])
            else:
                matrix = body.matrix(weight, {name: f"{name}{suffix}" for name in self._lists(n)})
            result = body.add("MatMul", rows, body.add("Cast", matrix, to=int(_FLOAT)))
            result = body.add("Add", result, biases[place]) if self.bias else result
            outputs[f"Y{suffix}"] = apply(body, self.activation, result)
        return body.function(self.op_type, [x, *weights, *biases], outputs, self.attributes())


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
    after, n, pixel = epilogue(found), found.n, node.op_type == "Conv"
    variant = ProductVariant(
        layout=layout,
        k=found.k,
        columns=(n,),
        bias=after.bias is not None,
        activation=after.activation,
        rounds=node.name in fusing.rounding,
    )
    if layout == "transposed":  # the shape that the weight has in its file; a Conv's has more dimensions
        found.weight.shape = ir.Shape((n, found.k))
    inputs = [_rows(fusing, found) if pixel else node.inputs[0], found.weight]
    if after.bias is not None:
        inputs.append(_bias(fusing, found, after.bias))
    made = fusing.operator(variant.function(fusing.opset), inputs, variant.attributes(), node, node.name)
    result = output = made.outputs[0]
    if pixel or after.reshape is not None:  # the output is a value that the graph did not have
        output.name, output.type = fusing.fresh(f"{node.name}/product"), node.outputs[0].type
        output.shape = ir.Shape((*_batch(found), n)) if pixel else node.outputs[0].shape
    if pixel:
        result = _image(fusing, found, output)
    if after.reshape is not None:  # it stays, and gives the activation's result
        after.reshape.replace_input_with(0, result)
        result = after.reshape.outputs[0]
    return fusing.replace("product", node, (node, *after.nodes), made, {after.result: result})


def _read_by_refused(fusing: Fusing, weight: ir.Value) -> bool:
    return any(reader.name in fusing.refused for reader in readers(weight))


def _bias(fusing: Fusing, found: Product, bias: ir.Value) -> ir.Value:
    if len(const_dims(bias)) <= 1:
        return bias
    columns = initializer(fusing.graph, fusing.fresh(f"{found.node.name}/columns"), ir.tensor([found.n]))
    node = ir.node("Reshape", [bias, columns])
    return fusing.insert(node, found.node, f"{found.node.name}/bias", bias.type, (found.n,))


def _batch(found: Product) -> tuple[int | ir.SymbolicDim | None]:
    """Return the first dimension of a Conv's output, as far as it is known."""
    shape = found.node.outputs[0].shape
    return (None if shape is None else shape[0],)


def _rows(fusing: Fusing, found: Product) -> ir.Value:
    """Return the single pixels of a Conv, one row each."""
    flat = ir.node("Flatten", [found.node.inputs[0]], attributes={"axis": 1})
    shape = (*_batch(found), found.k)
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
    add = None if bias is not None or product.node.op_type == "Conv" else _add(product.node, product.n)
    if add is not None:
        bias = add.inputs[1] if add.inputs[0] is result else add.inputs[0]
        result = add.outputs[0]
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


def _add(product: ir.Node, columns: int) -> ir.Node | None:
    """Return the Add of a bias, if it alone reads the output of ``product`` and adds no dimension."""
    given = product.outputs[0]
    node = only_reader(given)
    if node is None or node.op_type != "Add":
        return None
    bias = node.inputs[1] if node.inputs[0] is given else node.inputs[0]
    tensor = const(bias)
    rank = 1 if given.shape is None else len(given.shape)
    return node if takes_bias(bias, columns) and tensor is not None and len(dims(tensor)) <= rank else None


# --- products of the same activations ---------------------------------------------------------------------------------


def groups(graph: ir.Graph) -> list[list[ir.Node]]:
    """Return the products that may be joined, two or three at a time, by what they read; in graph order.

    Not joined: products with an activation, with a weight that is not in whole panels, or with a bias of several
    dimensions, which a node reshapes.
    """
    alike: dict[tuple[ir.Value | None, str], list[ir.Node]] = {}
    for node in graph:
        if node.domain == DOMAIN and node.op_type in _JOINABLE and all(map(const, node.inputs[1:])):
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
    function, sizes = _lookup_function(k, n, fusing.opset), {"k": k, "n": n, **panel_shapes(k, n)}
    made = fusing.operator(function, [indices, table], sizes, node, node.name)
    return fusing.replace("lookup", node, [node], made, {node.outputs[0]: made.outputs[0]})


def _lookup_function(k: int, n: int, opset: int) -> ir.Function:
    """Return the function I int64 [...], from -n to n - 1, W (k·n in panels) → Y [..., k].

    Rows are looked up before they are widened, so that the table which ONNX Runtime folds at load is bf16.
    kernels/ort/operators.cpp has an operator for each form of panels.
    """
    indices, weight = ir.Value(name="I"), ir.Value(name="W")
    body, lists = FunctionBody(opset), panel_shapes(k, n)
    table = body.add("Transpose", body.matrix(weight, {name: name for name in lists}), perm=[1, 0])
    rows = body.add("Cast", body.add("Gather", table, indices, axis=0), to=int(_FLOAT))
    return body.function(f"Gather_{panel_form(n)}", [indices, weight], {"Y": rows}, ("k", "n", *lists))
