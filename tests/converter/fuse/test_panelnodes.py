from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

import graphs
from bf16kit.numerics.panels import pack
from converter.fuse.unpanel import matrix_nodes, panel_form, panel_shapes
from converter.graph.initializers import dims


@pytest.mark.parametrize(("k", "n"), [(3, 64), (5, 32), (7, 31), (4, 33), (2, 100), (1, 1), (1, 40)])
def test_the_nodes_give_the_matrix_that_was_packed(k: int, n: int) -> None:
    matrix = graphs.values(k, n).reshape(k, n).astype(ml_dtypes.bfloat16)
    weight = _value("w", ir.tensor(pack(matrix, 1)))
    lists = {name: _value(name, ir.tensor(np.array(sizes))) for name, sizes in panel_shapes(k, n).items()}
    nodes = matrix_nodes(weight, lists)
    widened = ir.node("Cast", [nodes[-1].outputs[0]], attributes={"to": 1})
    result = widened.outputs[0]
    result.name, result.type, result.shape = "y", ir.TensorType(ir.DataType.FLOAT), ir.Shape((k, n))
    graph = ir.Graph(
        [], [result], nodes=[*nodes, widened], initializers=[weight, *lists.values()], opset_imports={"": 13}, name="g"
    )
    proto = ir.to_proto(ir.Model(graph, ir_version=10))
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(session.run(None, {})[0], matrix.astype(np.float32))


def test_the_form_depends_on_the_number_of_columns() -> None:
    assert [panel_form(panel_shapes(8, n)) for n in (64, 50, 20)] == ["panels", "panels_tail", "panels_narrow"]


def _value(name: str, tensor: ir.TensorProtocol) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(dims(tensor)), const_value=tensor)
