"""Replaces look-ups in a table stored in panels, which products read too, by bf16kit's CPU kernel."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from bf16kit.errors import ConversionError
from bf16kit.runtime.kernel import DOMAIN
from converter.fuse.functions import FunctionBody, define
from converter.fuse.panelnodes import matrix_nodes, panel_form, panel_shapes
from converter.fuse.work import KernelWork
from converter.graph.initializers import const, dims
from converter.graph.names import FreshNames, all_value_names
from converter.graph.step import Step
from converter.passes.rewriting import replace_output

FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64


class LookUp(Step):
    """Replace the look-ups of ``work`` by ``bf16kit::Gather_panels``: in matrices [n, k] in panels along their axis 0.

    A node keeps its name, and its output replaces the Gather's under the same name: rows widened to fp32. Indices that
    are not int64 are cast. The table is made flat later, with the products that read it, in :class:`UseKernel`.

    Requires: types are known, bf16 weights have not been widened, and tables are still matrices, so :class:`UseKernel`
    comes later. Ensures: no Gather reads a tensor in panels.
    """

    name = "look rows up in panels"

    def __init__(self, work: KernelWork) -> None:
        super().__init__()
        self._work = work

    def apply(self, model: ir.Model) -> bool:
        found = self._work.lookups_in(model)
        if not found:
            return False
        fresh = FreshNames(all_value_names(model) | {node.name or "" for node in model.graph.all_nodes()})
        opset, functions = model.opset_imports[""], {}
        for node, table in found.items():
            n, k = _size(table)
            lists = panel_shapes(k, n)
            attributes: dict[str, int | list[int]] = {"k": k, "n": n, **lists}
            inputs = [_indices(node, fresh), table]
            kernel_node = ir.node(op_type(lists), inputs, attributes, domain=DOMAIN, name=node.name)
            functions[kernel_node.op_type] = function(lists, opset)
            output, old_output = kernel_node.outputs[0], node.outputs[0]
            output.type, output.shape = old_output.type, old_output.shape
            model.graph.insert_before(node, kernel_node)
            replace_output(model.graph, node, output)
        define(model, functions.values())
        return True

    def ensures(self, model: ir.Model) -> None:
        for name in sorted(self._work.panels.keys() & model.graph.initializers.keys()):
            for node, _ in model.graph.initializers[name].uses():
                if (node.domain, node.op_type) == ("", "Gather"):
                    raise ConversionError(f"node {node.name!r} reads {name!r}, which is stored in panels")


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


def _size(table: ir.Value) -> tuple[int, ...]:
    tensor = const(table)
    if tensor is None:
        raise ConversionError(f"table {table.name!r} has no data")
    return dims(tensor)


def _indices(node: ir.Node, fresh: FreshNames) -> ir.Value | None:
    """Return the indices of ``node`` as int64."""
    indices = node.inputs[1]
    if indices is None or indices.dtype == INT64 or node.graph is None:
        return indices
    cast = ir.node("Cast", [indices], {"to": int(INT64)}, name=fresh.make(f"{node.name}/indices"))
    wide = cast.outputs[0]
    wide.name, wide.type, wide.shape = cast.name, ir.TensorType(INT64), indices.shape
    node.graph.insert_before(node, cast)
    return wide
