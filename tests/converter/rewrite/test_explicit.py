"""A graph made explicit: functions inlined, constants and the weights of bodies initializers of the main graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from lowered import assert_same_tensors, lower
from onnx import GraphProto, ModelProto, helper

import graphs
from converter.graph.types import run
from converter.rewrite.explicit import (
    ConstantsToInitializers,
    HoistInitializers,
    InlineFunctions,
    NameEverything,
    floating_tensors,
)


def test_functions_are_inlined_and_the_exporter_s_stack_traces_are_dropped() -> None:
    proto = graphs.mlp((16, 16))
    proto.graph.node[0].metadata_props.add(key="pkg.torch.onnx.stack_trace", value="/home/somebody/model.py")
    double = helper.make_function(
        "local", "Double", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])], [helper.make_opsetid("", 22)]
    )
    proto.functions.append(double)
    proto.opset_import.append(helper.make_opsetid("local", 1))
    proto.graph.node.append(helper.make_node("Double", ["y"], ["z"], domain="local"))
    proto.graph.output[0].name = "z"
    model = run([InlineFunctions()], ir.from_proto(proto))
    assert [node.op_type for node in model.graph] == ["MatMul", "Add", "Add"]
    assert b"somebody" not in ir.to_proto(model).SerializeToString()


def test_constants_written_as_attributes_become_tensors_of_onnx_s_dtypes() -> None:
    proto = graphs.parsed(
        """(float[batch, 4] x) => (float[batch, 1] y) {
            one = Constant <value_float = 1.0> () axes = Constant <value_ints = [1]> ()
            s = ReduceSum (x, axes) y = Add (s, one)
        }"""
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


def test_shapes_and_constants_without_an_output_are_not_tensors_of_the_file() -> None:
    proto = graphs.mlp()
    proto.graph.initializer.append(graphs.initializer("shape", np.array([-1, 2, 2])))
    proto.graph.node.append(helper.make_node("Constant", [], [], value_floats=[1.0] * 300))
    assert sorted(floating_tensors(ir.from_proto(proto))) == ["b0", "b1", "w0", "w1"]


_STEPS = (NameEverything(), ConstantsToInitializers(), HoistInitializers())


def _choice(branch: Callable[[str, int], GraphProto], shape: list[int | str]) -> ModelProto:
    choice = helper.make_node("If", ["flag"], ["y"], then_branch=branch("a", 1), else_branch=branch("b", 2))
    inputs = [graphs.edge("x", ["batch", 16]), graphs.edge("flag", [], onnx.TensorProto.BOOL)]
    return graphs.model([choice], inputs, [graphs.edge("y", shape)])


def test_weights_of_both_branches_move_to_the_main_graph_under_different_names() -> None:
    def branch(name: str, seed: int) -> GraphProto:
        node = helper.make_node("MatMul", ["x", "weight"], [name])
        weight = graphs.initializer("weight", graphs.values(16, 16, seed=seed))
        return helper.make_graph([node], name, [], [graphs.edge(name, ["batch", 16])], [weight])

    model = run(_STEPS, ir.from_proto(_choice(branch, ["batch", 16])))
    stored = {name: value.const_value for name, value in model.graph.initializers.items()}
    assert len(stored) == 2
    for body, seed in zip(model.graph.subgraphs(), (2, 1), strict=True):  # attributes come in alphabetical order
        read = next(iter(body)).inputs[1]
        assert read is not None
        tensor = stored[read.name or ""]
        assert tensor is not None
        np.testing.assert_array_equal(tensor.numpy(), graphs.values(16, 16, seed=seed))
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


def test_a_weight_with_the_name_of_a_value_in_another_body_is_renamed() -> None:
    proto = graphs.if_branches()
    then = next(a.g for a in proto.graph.node[0].attribute if a.name == "then_branch")
    then.node[0].output[0] = then.output[0].name = "inner"  # the name of the other branch's weight
    onnx.checker.check_model(proto, full_check=True)
    model = run(_STEPS, ir.from_proto(proto))
    assert sorted(model.graph.initializers) == ["captured", "inner_1"]
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


def test_a_branch_that_only_returns_a_constant_still_returns_it() -> None:
    def branch(name: str, value: int) -> GraphProto:
        constant = graphs.initializer(name, np.full((32,), value, np.float32))
        return helper.make_graph([], f"{name}_graph", [], [graphs.edge(name, [32])], [constant])

    model = run(_STEPS, ir.from_proto(_choice(branch, [32])))
    assert {name.split(".")[0] for name in model.graph.initializers} == {"a", "b"}
    assert [[n.op_type for n in body] for body in model.graph.subgraphs()] == [["Identity"], ["Identity"]]
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
