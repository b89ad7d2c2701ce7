from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
from onnx import GraphProto, helper

import graphs
from converter.graph.names import NameEverything
from converter.graph.step import run
from converter.rewrite.constants import ConstantsToInitializers
from converter.rewrite.hoisting import HoistInitializers

_STEPS = (NameEverything(), ConstantsToInitializers(), HoistInitializers())


def test_weights_of_both_branches_move_to_the_main_graph_under_different_names() -> None:
    def branch(name: str, seed: int) -> GraphProto:
        node = helper.make_node("MatMul", ["x", "weight"], [name])
        weight = graphs.initializer("weight", graphs.values(16, 16, seed=seed))
        return helper.make_graph([node], name, [], [graphs.edge(name, ["batch", 16])], [weight])

    choice = helper.make_node("If", ["flag"], ["y"], then_branch=branch("a", 1), else_branch=branch("b", 2))
    proto = graphs.model(
        [choice],
        [graphs.edge("x", ["batch", 16]), graphs.edge("flag", [], onnx.TensorProto.BOOL)],
        [graphs.edge("y", ["batch", 16])],
    )
    model = run(_STEPS, ir.from_proto(proto))
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


def test_a_constant_in_a_loop_body_moves_out_under_its_own_name() -> None:
    model = run(_STEPS, ir.from_proto(graphs.loop()))
    assert sorted(model.graph.initializers) == ["captured", "own"]
    assert all(not body.initializers for body in model.graph.subgraphs())
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


def test_a_branch_that_only_returns_a_constant_still_returns_it() -> None:
    def branch(name: str, value: float) -> GraphProto:
        constant = graphs.initializer(name, np.full((32,), value, np.float32))
        return helper.make_graph([], f"{name}_graph", [], [graphs.edge(name, [32])], [constant])

    choice = helper.make_node("If", ["flag"], ["y"], then_branch=branch("a", 1), else_branch=branch("b", 2))
    proto = graphs.model([choice], [graphs.edge("flag", [], onnx.TensorProto.BOOL)], [graphs.edge("y", [32])])
    model = run(_STEPS, ir.from_proto(proto))
    assert {name.split(".")[0] for name in model.graph.initializers} == {"a", "b"}
    assert [[n.op_type for n in body] for body in model.graph.subgraphs()] == [["Identity"], ["Identity"]]
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
