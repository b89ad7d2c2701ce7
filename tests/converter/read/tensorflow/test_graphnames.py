"""The names of a translated graph do not depend on the numbers that tf2onnx adds to them."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

import graphs
from converter.read.tensorflow.graphnames import make_reproducible


def _numbered(numbers: tuple[int, int, int]) -> ir.Model:
    """x → MatMul by w → Add b → y, with names as tf2onnx makes them."""
    first, second, third = numbers
    helper = onnx.helper
    call = "StatefulPartitionedCall_1/PartitionedCall/"
    nodes = [
        helper.make_node(
            "MatMul", ["x", f"const__{first}"], [f"{call}dense/MatMul__{third}:0"], name=f"{call}dense/MatMul"
        ),
        helper.make_node("Add", [f"{call}dense/MatMul__{third}:0", f"const__{second}"], ["y"], name=f"Add__{third}"),
    ]
    weights = [
        graphs.initializer(f"const__{first}", graphs.values(4, 4)),
        graphs.initializer(f"const__{second}", graphs.values(4, seed=1)),
    ]
    if first > second:
        weights.reverse()
    return ir.from_proto(graphs.model(nodes, [graphs.edge("x", ["n", 4])], [graphs.edge("y", ["n", 4])], weights))


def test_numbers_and_names_of_inlined_calls_are_removed() -> None:
    model = _numbered((7, 12, 9))
    make_reproducible(model)
    assert [node.name for node in model.graph] == ["dense/MatMul", "Add"]
    assert [value.name for node in model.graph for value in node.outputs] == ["dense/MatMul:0", "y"]
    assert list(model.graph.initializers) == ["constant", "constant_1"]
    assert [value.name for value in model.graph.inputs] == ["x"]


@pytest.mark.parametrize("numbers", [(1, 2, 3), (30, 4, 5), (2, 1, 1)])
def test_other_numbers_give_the_same_bytes(numbers: tuple[int, int, int]) -> None:
    one, other = _numbered((7, 12, 9)), _numbered(numbers)
    make_reproducible(one)
    make_reproducible(other)
    assert ir.to_proto(one).SerializeToString() == ir.to_proto(other).SerializeToString()


def test_values_in_the_bodies_of_branches_are_renamed_too() -> None:
    model = ir.from_proto(graphs.if_branches())
    before = onnx.ModelProto.FromString(ir.to_proto(model).SerializeToString())
    for graph in model.graphs():
        for node in graph:
            for value in node.outputs:
                if value not in model.graph.outputs:
                    value.name = f"{value.name}__{id(value) % 97}"
    make_reproducible(model)
    onnx.checker.check_model(ir.to_proto(model))
    assert len(ir.to_proto(model).graph.node) == len(before.graph.node)
    assert not [
        value.name for graph in model.graphs() for node in graph for value in node.outputs if "__" in (value.name or "")
    ]


@pytest.mark.parametrize("turned", [False, True])
def test_nodes_that_may_be_in_any_order_are_put_in_one_order(turned: bool) -> None:
    """The two branches have no names of their own; their weights distinguish them."""
    helper = onnx.helper
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a__1"], name="MatMul__1"),
        helper.make_node("MatMul", ["x", "v"], ["b__2"], name="MatMul__2"),
    ]
    nodes = [*(reversed(nodes) if turned else nodes), helper.make_node("Add", ["a__1", "b__2"], ["y"], name="Add")]
    weights = [graphs.initializer("w", graphs.values(4, 4)), graphs.initializer("v", graphs.values(4, 4, seed=1))]
    model = ir.from_proto(graphs.model(nodes, [graphs.edge("x", ["n", 4])], [graphs.edge("y", ["n", 4])], weights))
    make_reproducible(model)
    assert [node.name for node in model.graph] == ["MatMul", "MatMul_1", "Add"]
    assert _bytes(model) == _bytes(_settled(nodes[::-1][1:] + nodes[2:], weights))


def _settled(nodes: list[onnx.NodeProto], weights: list[onnx.TensorProto]) -> ir.Model:
    model = ir.from_proto(
        graphs.model(nodes, [graphs.edge("x", ["n", 4])], [graphs.edge("y", ["n", 4])], weights[::-1])
    )
    make_reproducible(model)
    return model


def _bytes(model: ir.Model) -> bytes:
    return bytes(ir.to_proto(model).SerializeToString())
