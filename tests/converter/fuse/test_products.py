from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx import NodeProto, TensorProto, helper

import graphs
from converter.fuse import products as module
from converter.fuse.products import Product, product
from converter.graph.step import run
from converter.graph.types import InferTypes


def _model(nodes: Sequence[NodeProto], weight: tuple[int, int] = (32, 48)) -> ir.Model:
    """Return x [batch, 32] → ``nodes`` → y; ``w`` is the weight, ``row`` a bias of 48, ``ids`` are indices."""
    proto = graphs.model(
        nodes,
        [graphs.edge("x", ["batch", 32]), graphs.edge("ids", ["batch"], TensorProto.INT64)],
        [graphs.edge("y")],
        [
            graphs.initializer("w", graphs.values(*weight)),
            graphs.initializer("row", graphs.values(48)),
            graphs.initializer("wide", graphs.values(1, 48)),
            graphs.initializer("scalar", np.array(0.5, np.float32)),
            graphs.initializer("column", graphs.values(7, 1)),
        ],
    )
    return run([InferTypes()], ir.from_proto(proto))


def panelled_weights(model: ir.Model, narrow: Collection[str]) -> dict[str, int]:
    """Return the weights of ``narrow`` that are stored in panels, with the axis of the panels."""
    return module.panelled_weights(model.graph, narrow)


def products(model: ir.Model, narrow: Collection[str]) -> dict[ir.Node, Product]:
    """Return the products that the kernel can compute, by their nodes."""
    return {node: found for node in model.graph if (found := product(node, narrow)) is not None}


def _gemm(bias: str | None = None, **attributes: Any) -> list[NodeProto]:
    inputs = ["x", "w"] if bias is None else ["x", "w", bias]
    return [helper.make_node("Gemm", inputs, ["y"], **attributes)]


@pytest.mark.parametrize("bias", [None, "row", "wide"])
def test_a_gemm_s_weight_is_panelled_along_the_product_s_columns(bias: str | None) -> None:
    assert panelled_weights(_model(_gemm(bias)), {"w"}) == {"w": 1}
    assert panelled_weights(_model(_gemm(bias, transB=1), (48, 32)), {"w"}) == {"w": 0}


@pytest.mark.parametrize(
    ("bias", "attributes"),
    [
        (None, {"alpha": 0.5}),
        ("row", {"beta": 0.5}),
        ("scalar", {}),
        ("column", {}),
    ],
)
def test_a_gemm_that_is_more_than_a_product_and_a_bias_is_not_replaced(
    bias: str | None, attributes: dict[str, float]
) -> None:
    assert panelled_weights(_model(_gemm(bias, **attributes)), {"w"}) == {}


def test_a_weight_kept_in_fp32_is_not_panelled() -> None:
    assert panelled_weights(_model(_gemm()), set()) == {}


def test_a_weight_that_two_products_read_in_the_same_way_is_panelled_once() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Gemm", ["x", "w"], ["b"]),
        helper.make_node("Add", ["a", "b"], ["y"]),
    ]
    assert panelled_weights(_model(nodes), {"w"}) == {"w": 1}


def test_a_weight_that_is_transposed_for_products_alone_is_panelled_along_its_rows() -> None:
    nodes = [helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0]), helper.make_node("MatMul", ["x", "t"], ["y"])]
    assert panelled_weights(_model(nodes, (48, 32)), {"w"}) == {"w": 0}


def _looked_up(axis: int = 0) -> NodeProto:
    return helper.make_node("Gather", ["w", "ids"], ["rows"], axis=axis)


@pytest.mark.parametrize("axis", [0, -2])
@pytest.mark.parametrize("op", ["Gemm", "MatMul"])
def test_a_table_that_is_looked_up_and_multiplied_is_panelled_along_its_rows(op: str, axis: int) -> None:
    nodes = [_looked_up(axis), helper.make_node("Transpose", ["w"], ["t"])]
    if op == "Gemm":
        nodes[1:] = [helper.make_node("Gemm", ["x", "w"], ["y"], transB=1)]
    else:
        nodes.append(helper.make_node("MatMul", ["x", "t"], ["y"]))
    model = _model(nodes, (48, 32))
    assert panelled_weights(model, {"w"}) == {"w": 0}


def test_a_table_that_a_body_looks_up_keeps_its_rows() -> None:
    then, other = (
        helper.make_graph([_looked_up()], name, [], [graphs.edge("rows", ["batch", 32])]) for name in ("then", "else")
    )
    nodes = [
        helper.make_node("Cast", ["ids"], ["flags"], to=TensorProto.BOOL),
        helper.make_node("ReduceMax", ["flags"], ["flag"], keepdims=0),
        helper.make_node("If", ["flag"], ["found"], then_branch=then, else_branch=other),
        helper.make_node("Gemm", ["x", "w"], ["y"], transB=1),
    ]
    model = _model(nodes, (48, 32))
    assert panelled_weights(model, {"w"}) == {}
    assert [found.layout({}) for found in products(model, {"w"}).values()] == ["transposed"]


@pytest.mark.parametrize("reader", ["columns", "indices", "Neg", "Transpose"])
def test_a_weight_that_another_node_also_reads_keeps_its_rows(reader: str) -> None:
    readers = {
        "columns": _looked_up(axis=1),
        "indices": helper.make_node("GatherND", ["w", "ids"], ["rows"]),
    }
    nodes = [
        helper.make_node("Gemm", ["x", "w"], ["y"], transB=1),
        readers.get(reader) or helper.make_node(reader, ["w"], ["rows"]),
        helper.make_node("Abs", ["rows"], ["z"]),
    ]
    model = _model(nodes, (48, 32))
    assert panelled_weights(model, {"w"}) == {}
    assert [found.axis for found in products(model, {"w"}).values()] == [0]


def test_a_weight_that_a_body_reads_keeps_its_rows() -> None:
    model = run([InferTypes()], ir.from_proto(graphs.if_branches()))
    assert panelled_weights(model, {"captured"}) == {}
    proto = graphs.if_branches()
    proto.graph.node.append(helper.make_node("MatMul", ["x", "captured"], ["z"]))
    proto.graph.output.append(graphs.edge("z", ["batch", 16]))
    model = run([InferTypes()], ir.from_proto(proto))
    assert panelled_weights(model, {"captured"}) == {}
    assert [found.weight.name for found in products(model, {"captured"}).values()] == ["captured"]
