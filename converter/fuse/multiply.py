"""Replaces a product by a weight stored in bf16, with the bias and the activation after it, by bf16kit's CPU kernel."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import onnx_ir as ir

from converter.fuse.activations import Activation, activation
from converter.fuse.functions import FunctionBody, Fusing, Fusion, ProductVariant, function, lists
from converter.fuse.products import Layout, Product, gathers_rows, product, readers, takes_bias
from converter.fuse.unpanel import matrix_nodes, panel_form, panel_shapes
from converter.graph.initializers import const, const_dims, dims, initializer
from converter.graph.values import only_reader


def multiply(fusing: Fusing, node: ir.Node) -> Fusion | None:
    """Replace the product ``node`` by ``bf16kit::MatMul_…``; None if the kernel cannot compute it.

    A product that is to round its activations becomes ``bf16kit::MatMulBf16_…``. The kernel's node keeps the product's
    name, and its output that of the last node that it stands for. A product stays if a refused node reads its weight
    too: stored in panels, a weight is read either by the kernel alone or, put together, by others.
    """
    found = product(node, fusing.narrow)
    layout = None if found is None else found.layout(fusing.panels)
    if found is None or layout is None or any(reader.name in fusing.refused for reader in readers(found.weight)):
        return None
    after = epilogue(found)
    record = Fusion(
        "product",
        node.name or "",
        node.name or "",
        (node.name or "", *(each.name or "" for each in after.nodes)),
        (after.result.name or "",),
    )
    _replace(fusing, found, layout, after)
    return record


def _replace(fusing: Fusing, found: Product, layout: Layout, after: Epilogue) -> None:
    node, k, n = found.node, found.k, found.n
    rounds = node.name in fusing.rounding
    variant = ProductVariant.of(layout, k, n, bias=after.bias is not None, activation=after.activation, rounds=rounds)
    pixel = node.op_type == "Conv"
    if layout == "transposed":  # the shape that the weight has in its file; a Conv's has more dimensions
        found.weight.shape = ir.Shape((n, k))
    inputs = [_rows(fusing, found) if pixel else node.inputs[0], found.weight]
    if after.bias is not None:
        inputs.append(_bias(fusing, found, after.bias))
    sizes = {"k": k, "n": n, "layout": layout, "activation": after.activation, **lists(layout, k, n)}
    (output,) = fusing.operator(function(variant, fusing.opset), inputs, sizes, node, name=node.name)
    result = output
    if pixel or after.reshape is not None:  # the output is a value that the graph did not have
        output.name, output.type = fusing.fresh(f"{node.name}/product"), node.outputs[0].type
        output.shape = ir.Shape((*_batch(found), n)) if pixel else node.outputs[0].shape
    if pixel:
        result = _image(fusing, found, output)
    if after.reshape is not None:  # it stays, and gives the activation's result
        after.reshape.replace_input_with(0, result)
        result = after.reshape.outputs[0]
    fusing.replace({after.result: result}, [*reversed(after.nodes), node])


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


@dataclass(frozen=True, slots=True)
class Epilogue:
    """The ``nodes`` after a product, in order, which are not needed if the kernel does their work.

    ``bias`` is an initializer of one number per column. ``result`` is the output of the last of product and nodes.
    ``reshape`` is a Reshape between bias and activation; it stays, after the kernel's node.
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
    if not activated and (moving := _reshape(result)) is not None:
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


def _reshape(result: ir.Value) -> ir.Node | None:
    """Return the Reshape that alone reads ``result``. GPT-2 has one: it multiplies matrices and activates batches."""
    node = only_reader(result)
    return node if node is not None and node.op_type == "Reshape" and node.inputs[0] is result else None


FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64


def look_up(fusing: Fusing, node: ir.Node) -> Fusion | None:
    """Replace the Gather ``node`` of rows of a matrix [n, k] in panels by ``bf16kit::Gather_panels``; else return None.

    The kernel's node keeps the Gather's name, and its output the Gather's: rows widened to fp32. Indices that are not
    int64 are cast. A table that a refused node reads stays, as in :func:`multiply`.
    """
    table = node.inputs[0] if gathers_rows(node) else None
    if table is None or fusing.panels.get(table.name or "") != 0:
        return None
    if any(reader.name in fusing.refused for reader in readers(table)):
        return None
    n, k = const_dims(table)
    lists = panel_shapes(k, n)
    inputs, sizes = [_indices(fusing, node), table], {"k": k, "n": n, **lists}
    (output,) = fusing.operator(lookup_function(lists, fusing.opset), inputs, sizes, node, name=node.name)
    name = node.name or ""
    record = Fusion("lookup", name, name, (name,), (node.outputs[0].name or "",))
    fusing.replace({node.outputs[0]: output}, [node])
    return record


def op_type(lists: Collection[str]) -> str:
    """Return the operator's name for tables of these :func:`panel_shapes`; kernels/ort/operators.cpp has them all."""
    return f"Gather_{panel_form(lists)}"


def lookup_function(lists: Collection[str], opset: int) -> ir.Function:
    """Return the function of that operator in ONNX's own operators, of ``opset``, 13 or newer.

    I int64 [...], from -n to n - 1, W (k·n in panels) → Y [..., k]. Rows are looked up before they are widened, so that
    the table which ONNX Runtime folds at load is bf16.
    """
    indices, weight = ir.Value(name="I"), ir.Value(name="W")
    body = FunctionBody(opset)
    body.extend(matrix_nodes(weight, {name: body.integers_attribute(name) for name in lists}))
    table = body.add("Transpose", body.nodes[-1].outputs[0], perm=[1, 0])
    rows = body.add("Cast", body.add("Gather", table, indices, axis=0), to=int(FLOAT))
    rows.name = "Y"
    return body.function(op_type(lists), [indices, weight], [rows], ("k", "n", *lists))


def _indices(fusing: Fusing, node: ir.Node) -> ir.Value | None:
    """Return the indices of ``node`` as int64."""
    indices = node.inputs[1]
    if indices is None or indices.dtype == INT64:
        return indices
    cast = ir.node("Cast", [indices], {"to": int(INT64)})
    return fusing.insert(cast, node, f"{node.name}/indices", ir.TensorType(INT64), indices.shape)
