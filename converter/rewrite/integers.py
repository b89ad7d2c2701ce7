"""Computes constant integers, such as an exporter's padding, so that fusions know them."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper
from onnx.reference import ReferenceEvaluator

from bf16kit.converter.graph.equality import Array
from bf16kit.converter.graph.initializers import const, initializer
from bf16kit.converter.graph.operators import MOVEMENT

_COMPUTED = MOVEMENT | {"Cast", "ConstantOfShape"}
_REPEATING = frozenset({"ConstantOfShape", "Expand", "Tile"})  # their last input says how large the result is
_FEW = 64  # integers of a tensor: more would be data


def compute_integers(model: ir.Model) -> None:
    """Replace the nodes of the main graph that only move or cast a few constant integers by their results.

    torch's exporter computes the numbers of a Pad so, in eight nodes. Nodes that give outputs of the graph stay.
    """
    opset = helper.make_opsetid("", model.opset_imports[""])
    for node in tuple(model.graph):
        if node.domain or node.op_type not in _COMPUTED or len(node.outputs) != 1 or not node.inputs:
            continue
        output, values = node.outputs[0], _integers(node)
        if values is None or output.name is None or output.is_graph_output():
            continue
        x = [helper.make_tensor_value_info(name, onnx.TensorProto.INT64, None) for name in values]
        y = [helper.make_tensor_value_info(output.name, onnx.TensorProto.INT64, None)]
        alone = helper.make_graph([ir.to_proto(node)], "alone", x, y)
        try:
            (result,) = ReferenceEvaluator(helper.make_model(alone, opset_imports=[opset])).run(None, values)
        except Exception:  # noqa: BLE001, S112 - ONNX Runtime judges the node, if the graph's outputs need it
            continue
        if isinstance(result, np.ndarray) and result.dtype == np.int64 and result.size <= _FEW:
            value = initializer(model.graph, output.name, ir.tensor(result, name=output.name))
            output.replace_all_uses_with(value)
            model.graph.remove(node, safe=True)


def _integers(node: ir.Node) -> dict[str, Array] | None:
    """Return what ``node`` reads, by name, if that is a few constant int64 integers; else None."""
    found: dict[str, Array] = {}
    for value in node.inputs:
        tensor = const(value)
        if value is None or tensor is None or tensor.dtype != ir.DataType.INT64 or tensor.size > _FEW:
            return None
        found[value.name or ""] = tensor.numpy()
        repeats = node.op_type in _REPEATING and value is node.inputs[-1]
        if repeats and math.prod(map(abs, tensor.numpy().ravel().tolist())) > _FEW:
            return None
    return found
