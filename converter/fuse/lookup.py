"""Replaces look-ups in a table stored in panels, which products read too, by bf16kit's CPU kernel."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from converter.fuse.functions import FunctionBody
from converter.fuse.fusing import Fusing, Fusion
from converter.fuse.products import gathers_rows, readers
from converter.fuse.unpanel import matrix_nodes, panel_form, panel_shapes
from converter.graph.initializers import const_dims

FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64


def look_up(fusing: Fusing, node: ir.Node) -> Fusion | None:
    """Replace the Gather ``node`` of rows of a matrix [n, k] in panels by ``bf16kit::Gather_panels``; else return None.

    The kernel's node keeps the Gather's name, and its output the Gather's: rows widened to fp32. Indices that are not
    int64 are cast. A table that a refused node reads stays, as in :func:`~converter.fuse.multiply.multiply`.
    """
    table = node.inputs[0] if gathers_rows(node) else None
    if table is None or fusing.panels.get(table.name or "") != 0:
        return None
    if any(reader.name in fusing.refused for reader in readers(table)):
        return None
    n, k = const_dims(table)
    lists = panel_shapes(k, n)
    inputs, sizes = [_indices(fusing, node), table], {"k": k, "n": n, **lists}
    (output,) = fusing.operator(function(lists, fusing.opset), inputs, sizes, node, name=node.name)
    name = node.name or ""
    record = Fusion("lookup", name, name, (name,), (node.outputs[0].name or "",))
    fusing.replace({node.outputs[0]: output}, [node])
    return record


def op_type(lists: Collection[str]) -> str:
    """Return the operator's name for tables of these :func:`panel_shapes`; kernels/ort/operators.cpp has them all."""
    return f"Gather_{panel_form(lists)}"


def function(lists: Collection[str], opset: int) -> ir.Function:
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
