"""Which graphs run as long as the sizes of their inputs say, and in which ones the values decide."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from artifacts import write_attention, write_counting, write_mlp, write_product
from onnx import helper

import graphs
from bf16kit.runtime.ort.runtimecost import depends_on_size_alone

Write = Callable[..., Any]
SQUARE = graphs.values(16, 16)


def graph_of(*nodes: onnx.NodeProto) -> bytes:
    """Return a graph of these nodes, which have an input ``x``, a constant ``w`` and an output ``y``."""
    made = graphs.model(nodes, [graphs.edge("x")], [graphs.edge("y")], [graphs.initializer("w", SQUARE)])
    return made.SerializeToString()


@pytest.mark.parametrize("write", [graphs.mlp, graphs.conv_bn, graphs.constant_nodes, graphs.loop, graphs.if_branches])
def test_products_with_weights_and_normalisation_depend_on_size_alone_and_control_flow_does_not(write: Write) -> None:
    assert depends_on_size_alone(write().SerializeToString()) == (write not in (graphs.loop, graphs.if_branches))


@pytest.mark.parametrize("write", [write_mlp, write_product, write_counting, write_attention])
def test_artifacts_of_dense_layers_depend_on_size_alone_and_those_with_loops_or_attention_do_not(
    tmp_path: Path, write: Write
) -> None:
    graph = write(tmp_path / "model" / "1").file("cpu.onnx")
    assert depends_on_size_alone(graph) == (write in (write_mlp, write_product))


@pytest.mark.parametrize(
    "node",
    [
        helper.make_node("NonZero", ["x"], ["y"]),
        helper.make_node("Expand", ["w", "x"], ["y"]),
        helper.make_node("Range", ["x", "x", "x"], ["y"]),
        helper.make_node("MatMul", ["x", "x"], ["y"]),
        helper.make_node("Relu", ["x"], ["y"], domain="com.example"),
        helper.make_node("Foo", ["x"], ["y"], domain="bf16kit"),
        helper.make_node("Reshape", ["w", "x"], ["y"]),
    ],
    ids=lambda node: f"{node.domain}{node.op_type}",
)
def test_output_sizes_from_values_products_of_inputs_and_unknown_operators_do_not(node: onnx.NodeProto) -> None:
    assert not depends_on_size_alone(graph_of(node))
    assert depends_on_size_alone(graph_of(helper.make_node("MatMul", ["w", "x"], ["y"])))


def test_two_free_dimensions_do_not() -> None:
    """The same bytes may then be of different shapes, of which one takes a thousand times as long."""
    relu = helper.make_node("Relu", ["x"], ["y"])
    shapes: list[list[int | str]] = [["n", 16], ["n", "m"]]
    one, two = (graphs.model([relu], [graphs.edge("x", shape)], [graphs.edge("y")]) for shape in shapes)
    assert depends_on_size_alone(one.SerializeToString())
    assert not depends_on_size_alone(two.SerializeToString())


def test_what_is_no_graph_does_not() -> None:
    assert not depends_on_size_alone(b"")
    assert not depends_on_size_alone(b"\xff" * 8)
