from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from lowered import assert_same_tensors, lower
from onnx import helper

import graphs
from converter.graph.step import run
from converter.rewrite.constants import ConstantsToInitializers, floating_tensors
from converter.rewrite.hoisting import HoistInitializers


def test_a_weight_in_a_constant_node_becomes_an_initializer_of_the_same_name() -> None:
    model = run([ConstantsToInitializers()], ir.from_proto(graphs.constant_nodes()))
    assert [node.op_type for node in model.graph] == ["MatMul"]
    tensor = model.graph.initializers["weight"].const_value
    assert tensor is not None
    np.testing.assert_array_equal(tensor.numpy(), graphs.values(16, 16))


def test_constants_written_as_attributes_become_tensors_of_onnx_s_dtypes() -> None:
    proto = graphs.model(
        [
            helper.make_node("Constant", [], ["one"], value_float=1.0),
            helper.make_node("Constant", [], ["axes"], value_ints=[1]),
            helper.make_node("ReduceSum", ["x", "axes"], ["s"]),
            helper.make_node("Add", ["s", "one"], ["y"]),
        ],
        [graphs.edge("x", ["batch", 4])],
        [graphs.edge("y", ["batch", 1])],
    )
    model = run([ConstantsToInitializers()], ir.from_proto(proto))
    dtypes = {name: value.dtype for name, value in model.graph.initializers.items()}
    assert dtypes == {"one": ir.DataType.FLOAT, "axes": ir.DataType.INT64}


def test_a_constant_that_is_an_output_keeps_its_name_through_an_identity() -> None:
    weight = ir.to_proto(ir.tensor(graphs.values(4, 4), name="c"))
    proto = graphs.model(
        [helper.make_node("Constant", [], ["y"], value=weight)], [graphs.edge("x", [1])], [graphs.edge("y", [4, 4])]
    )
    model = run([ConstantsToInitializers(), HoistInitializers()], ir.from_proto(proto))
    assert [node.op_type for node in model.graph] == ["Identity"]
    assert [value.name for value in model.graph.outputs] == ["y"]
    assert list(model.graph.initializers) == ["y.value"]


def test_the_tensors_of_an_onnx_file_are_found_wherever_they_are() -> None:
    inside_if = floating_tensors(ir.from_proto(graphs.if_branches()))
    inside_loop = floating_tensors(ir.from_proto(graphs.loop()))
    assert sorted(inside_if) == ["captured", "inner"]
    assert sorted(inside_loop) == ["captured", "own"]
    np.testing.assert_array_equal(inside_if["inner"], graphs.values(16, 16, seed=1))


def test_a_weight_inside_a_function_is_a_tensor_of_the_file_and_restored(tmp_path: Path) -> None:
    """The function's constants are in the file, except a value that its caller passes as an attribute."""
    proto = graphs.mlp((16, 32))
    nodes = [
        helper.make_node("Constant", [], ["v"], value=graphs.initializer("v", graphs.values(32, 32, seed=4))),
        helper.make_node("Constant", [], ["factor"]),
        helper.make_node("MatMul", ["a", "v"], ["m"]),
        helper.make_node("Mul", ["m", "factor"], ["b"]),
    ]
    told = onnx.AttributeProto(name="value_float", ref_attr_name="by", type=onnx.AttributeProto.FLOAT)
    nodes[1].attribute.append(told)
    opset = helper.make_opsetid("", graphs.OPSET)
    proto.functions.append(helper.make_function("local", "Scaled", ["a"], ["b"], nodes, [opset], ["by"]))
    proto.opset_import.append(helper.make_opsetid("local", 1))
    proto.graph.node.append(helper.make_node("Scaled", ["y"], ["z"], domain="local", by=2.0))
    proto.graph.output[0].name = "z"
    made = lower(tmp_path / "m" / "1", proto)
    assert sorted(made.checkpoint) == ["b0", "v", "w0"]
    assert_same_tensors(made.artifact, made.checkpoint)
    feeds = {"x": graphs.values(2, 16)}
    np.testing.assert_array_equal(made.run_reference(feeds)["z"], made.run_source(feeds)["z"])


def test_shape_constants_are_not_weights() -> None:
    proto = graphs.model(
        [helper.make_node("Reshape", ["x", "shape"], ["y"])],
        [graphs.edge("x", ["batch", 4])],
        [graphs.edge("y", ["batch", 2, 2])],
        [graphs.initializer("shape", np.array([-1, 2, 2]))],
    )
    assert floating_tensors(ir.from_proto(proto)) == {}


def test_a_constant_without_an_output_is_not_a_tensor_of_the_file() -> None:
    proto = graphs.mlp()
    proto.graph.node.append(helper.make_node("Constant", [], [], value_floats=[1.0] * 300))
    assert sorted(floating_tensors(ir.from_proto(proto))) == ["b0", "b1", "w0", "w1"]
