"""Weights of an fp32 graph that several sessions can read from one place in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper

import graphs
from bf16kit.runtime.ort.kernel import read_in_place

W = np.ones((4, 4), np.float32)


def in_place(path: Path, *nodes: NodeProto) -> frozenset[str]:
    weights = [numpy_helper.from_array(W, "w"), numpy_helper.from_array(W.astype(np.float16), "half")]
    graph = helper.make_graph(nodes, "g", [graphs.edge("x", [4, 4])], [graphs.edge("y", [4, 4])], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", graphs.OPSET)], ir_version=10)
    (path / "g.onnx").write_bytes(model.SerializeToString())
    return read_in_place(path / "g.onnx")


@pytest.mark.parametrize("reads", [("MatMul", ["x", "w"]), ("Gemm", ["x", "w"]), ("Gather", ["w", "ids"])])
def test_weights_of_products_and_lookups_are_read_in_place(tmp_path: Path, reads: tuple[str, list[str]]) -> None:
    assert in_place(tmp_path, helper.make_node(*reads, ["y"])) == {"w"}


@pytest.mark.parametrize(
    "nodes",
    [
        [helper.make_node("MatMul", ["w", "x"], ["y"])],
        [helper.make_node("Add", ["x", "w"], ["y"])],
        [helper.make_node("Conv", ["x", "w"], ["y"])],
        [helper.make_node("MatMul", ["x", "half"], ["y"])],
        [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Transpose", ["w"], ["y"])],
        [helper.make_node("MatMul", ["x", "w"], ["y"], domain="another")],
        [helper.make_node("Identity", ["x"], ["y"])],
    ],
    ids=["from the left", "added", "convolved", "not fp32", "also turned", "of another domain", "not read"],
)
def test_weights_that_any_other_node_reads_are_not_read_in_place(tmp_path: Path, nodes: list[NodeProto]) -> None:
    assert in_place(tmp_path, *nodes) == frozenset()


def test_weights_that_a_subgraph_reads_are_not_read_in_place(tmp_path: Path) -> None:
    """In a subgraph, the same name may stand for another tensor."""
    body = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["out"])], "b", [], [graphs.edge("out", [4, 4])])
    yes = helper.make_node("Constant", [], ["yes"], value=helper.make_tensor("", TensorProto.BOOL, [], [True]))
    branch = helper.make_node("If", ["yes"], ["y"], then_branch=body, else_branch=body)
    assert in_place(tmp_path, yes, branch) == frozenset()
