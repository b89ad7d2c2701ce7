"""Turns Constant nodes into initializers, so that every weight is found in one place, whatever the exporter wrote."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bf16kit.messages.errors import ConversionError
from converter.graph.initializers import initializer, stays_inline
from converter.graph.step import Step


class ConstantsToInitializers(Step):
    """Replace every Constant node by an initializer of its graph, in the main graph and in subgraphs.

    Ensures: no Constant node that holds a tensor or a number is left. Strings and sparse tensors stay, because they are
    no weights.
    """

    name = "constants to initializers"

    def apply(self, model: ir.Model) -> bool:
        found = [node for node in model.graph.all_nodes() if _tensor(node) is not None]
        for node in found:
            _lift(node)
        return bool(found)

    def ensures(self, model: ir.Model) -> None:
        left = [node.name for node in model.graph.all_nodes() if _tensor(node) is not None]
        if left:
            raise ConversionError(f"constant {left[0]!r} is still a node")


def floating_tensors(model: ir.Model) -> dict[str, NDArray[Any]]:
    """Return every tensor that an ONNX model holds, by name: initializers and Constant nodes, in functions too.

    For a conversion, they are the checkpoint of an ONNX file. If a name occurs again in another graph, a number is
    appended. Arrays of external data are memory-mapped. Shape constants (integers of at most 1 KiB) are no weights and
    are left out.
    """
    tensors: dict[str, NDArray[Any]] = {}
    graphs = [*model.graphs()]
    for function in model.functions.values():
        graphs += [function.graph, *function.subgraphs()]
    for graph in graphs:
        for name, value in graph.initializers.items():
            if value.const_value is not None:
                _add(tensors, name, value.const_value)
    for node in (node for graph in graphs for node in graph):
        tensor = _tensor(node)
        if tensor is not None:
            _add(tensors, node.outputs[0].name or node.name or "constant", tensor)
    return tensors


def _add(tensors: dict[str, NDArray[Any]], name: str, tensor: ir.TensorProtocol) -> None:
    if tensor.dtype == ir.DataType.STRING or (not tensor.dtype.is_floating_point() and stays_inline(tensor)):
        return
    unique, count = name, 0
    while unique in tensors:
        count += 1
        unique = f"{name}_{count}"
    tensors[unique] = tensor.numpy()


def _lift(node: ir.Node) -> None:
    graph, output = node.graph, node.outputs[0]
    tensor = _tensor(node)
    if not isinstance(graph, ir.Graph) or tensor is None or output.name is None:
        return
    value = initializer(graph, output.name, tensor)
    output.replace_all_uses_with(value, replace_graph_outputs=True)
    graph.remove(node, safe=True)


def _tensor(node: ir.Node) -> ir.TensorProtocol | None:
    """Return what a Constant node holds, as a tensor.

    None for other nodes, strings, sparse tensors, attributes set by a function's caller, and nodes without an output.
    """
    if node.op_type != "Constant" or node.domain not in ("", "ai.onnx") or not node.outputs:
        return None
    for name, attribute in node.attributes.items():
        if attribute.is_ref():
            return None
        if name == "value":
            return attribute.as_tensor()
        if name in ("value_float", "value_floats"):
            return ir.tensor(np.asarray(attribute.value, dtype=np.float32), name=node.outputs[0].name)
        if name in ("value_int", "value_ints"):
            return ir.tensor(np.asarray(attribute.value, dtype=np.int64), name=node.outputs[0].name)
    return None
