"""BatchNorm written as a product and a sum becomes a BatchNormalization, which can be folded, with the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import graphs
from converter.read.tensorflow.reader import restore_batchnorms


def _model(
    scale: tuple[int, ...] = (1, 8, 1, 1),
    shift: tuple[int, ...] = (1, 8, 1, 1),
    *,
    swapped: bool = False,
    seen: bool = False,
) -> onnx.ModelProto:
    """x → Conv → Mul → Add → y; ``seen``: the product is an output as well."""
    helper = onnx.helper
    factors = ["scale", "c"] if swapped else ["c", "scale"]
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv"),
        helper.make_node("Mul", factors, ["m"], name="bn/mul"),
        helper.make_node("Add", ["m", "shift"], ["y"], name="bn/add"),
    ]
    weights = [
        graphs.initializer("w", graphs.values(8, 3, 3, 3)),
        graphs.initializer("scale", graphs.values(*scale, seed=1)),
        graphs.initializer("shift", graphs.values(*shift, seed=2)),
    ]
    outputs = [graphs.edge("y", ["n", 8, 4, 4]), *([graphs.edge("m", ["n", 8, 4, 4])] if seen else [])]
    return graphs.model(nodes, [graphs.edge("x", ["n", 3, 6, 6])], outputs, weights)


def _run(proto: onnx.ModelProto) -> Any:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(proto.SerializeToString(), options)
    return session.run(["y"], {"x": graphs.values(2, 3, 6, 6, seed=3)})[0]


@pytest.mark.parametrize("swapped", [False, True])
def test_a_product_and_a_sum_for_each_channel_become_one_batchnorm(swapped: bool) -> None:
    proto = _model(swapped=swapped)
    model = ir.from_proto(proto)
    restore_batchnorms(model)
    assert [node.op_type for node in model.graph] == ["Conv", "BatchNormalization"]
    made = {f"batchnorm_{part}" for part in ("scale", "shift", "mean", "variance")}
    assert set(model.graph.initializers) == {"w", *made}  # without the constants of the product and the sum
    rewritten = ir.to_proto(model)
    onnx.checker.check_model(rewritten, full_check=True)
    np.testing.assert_array_equal(_run(rewritten), _run(proto))


def test_batchnorms_of_one_size_share_a_mean_and_a_variance() -> None:
    """They are zeros and ones. For the 52 of MobileNetV2 they would otherwise be a hundredth of the checkpoint."""
    helper = onnx.helper
    proto = _model()
    more = [("Conv", ["y", "v"], "d"), ("Mul", ["d", "scale"], "n2"), ("Add", ["n2", "shift"], "z")]
    proto.graph.node.extend(helper.make_node(op, given, [gives], name=f"{gives}/2") for op, given, gives in more)
    proto.graph.initializer.append(graphs.initializer("v", graphs.values(8, 8, 1, 1)))
    proto.graph.output[0].CopyFrom(graphs.edge("z", ["n", 8, 4, 4]))
    model = ir.from_proto(proto)
    restore_batchnorms(model)
    batchnorms = [node for node in model.graph if node.op_type == "BatchNormalization"]
    assert [value is other for value, other in zip(*(node.inputs[3:] for node in batchnorms), strict=True)] == [
        True
    ] * 2
    assert "scale" not in model.graph.initializers
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


@pytest.mark.parametrize(
    "proto",
    [
        _model((1, 1, 1, 1)),
        _model((1, 1, 1, 1), (1, 1, 1, 1)),
        _model((8, 1, 1)),
        _model((1, 8, 4, 4)),
        _model(seen=True),
    ],
    ids=["one number", "one number twice", "another rank", "a number for each pixel", "seen outside"],
)
def test_products_and_sums_that_are_not_a_batchnorm_are_not_replaced(proto: onnx.ModelProto) -> None:
    model = ir.from_proto(proto)
    restore_batchnorms(model)
    assert [node.op_type for node in model.graph] == ["Conv", "Mul", "Add"]
