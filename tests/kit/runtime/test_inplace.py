"""Weights that are read in place, so that sessions can read them from one place in memory; ONNX Runtime would fold,
widen or pack others while it opens a session."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from onnx import NodeProto, TensorProto, helper

import graphs
from bf16kit.runtime.ort.kernel import DOMAIN, read_in_place

FP32 = np.ones((4, 4), np.float32)
BF16 = FP32.astype(ml_dtypes.bfloat16)
MATMUL = helper.make_node("MatMul", ["x", "w"], ["y"])
GEMM = helper.make_node("Gemm", ["x", "w"], ["y"])
LOOKUP = helper.make_node("Gather", ["w", "ids"], ["y"])
OURS = helper.make_node("MatMul", ["x", "w"], ["y"], domain=DOMAIN)


def in_place(*nodes: NodeProto, w: graphs.Array = FP32, out: bool = False, **options: bool) -> bool:
    """Return whether the weight ``w`` is read in place."""
    outputs = [graphs.edge("w" if out else "y", [4, 4])]
    model = graphs.model(list(nodes), [graphs.edge("x", [4, 4])], outputs, [graphs.initializer("w", w)])
    found = read_in_place(model, **options)
    assert found <= {"w"}
    return found == {"w"}


def test_products_and_lookups_of_fp32_weights_read_in_place_what_is_not_packed() -> None:
    for node in (MATMUL, GEMM, LOOKUP):
        assert in_place(node, products=True)
    assert [in_place(node) for node in (MATMUL, GEMM, LOOKUP)] == [False, False, True]


def test_the_kernel_reads_bf16_weights_in_place_and_a_lookup_always_does() -> None:
    for nodes in ([OURS], [LOOKUP], [OURS, LOOKUP]):
        assert in_place(*nodes, w=BF16, kernel=True)
        assert not in_place(*nodes, w=BF16.astype(np.int8), kernel=True)
    assert [in_place(OURS, w=BF16), in_place(OURS, LOOKUP, w=BF16), in_place(LOOKUP, w=BF16)] == [False, False, True]
    assert not in_place(OURS, kernel=True)  # a bias


@pytest.mark.parametrize(
    "nodes",
    [
        [helper.make_node("MatMul", ["w", "x"], ["y"])],
        [helper.make_node("Gather", ["x", "w"], ["y"])],
        [helper.make_node("Add", ["x", "w"], ["y"])],
        [helper.make_node("Conv", ["x", "w"], ["y"])],
        [MATMUL, helper.make_node("Transpose", ["w"], ["z"])],
        [LOOKUP, helper.make_node("Cast", ["w"], ["z"], to=TensorProto.FLOAT)],
        [helper.make_node("MatMul", ["x", "w"], ["y"], domain="another")],
        [helper.make_node("Identity", ["x"], ["y"])],
    ],
    ids=[
        "from the left",
        "as indices",
        "added",
        "convolved",
        "also turned",
        "also cast",
        "of another domain",
        "unread",
    ],
)
def test_weights_that_any_other_node_reads_are_not_read_in_place(nodes: list[NodeProto]) -> None:
    for w in (FP32, BF16):
        assert not in_place(*nodes, w=w, products=True, kernel=True)
    assert not in_place(MATMUL, w=FP32.astype(np.float16), products=True)
    assert not in_place(MATMUL, out=True, products=True)


def test_a_lookup_of_constant_rows_is_not_read_in_place() -> None:
    rows = helper.make_node("Constant", [], ["i"], value_ints=[1, 2])
    again = helper.make_node("Identity", ["i"], ["ids"])
    assert not in_place(rows, again, LOOKUP, products=True)


def test_weights_that_a_subgraph_reads_are_not_read_in_place() -> None:
    """In a subgraph, the same name may stand for another tensor."""
    body = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["out"])], "b", [], [graphs.edge("out", [4, 4])])
    yes = helper.make_node("Constant", [], ["yes"], value=helper.make_tensor("", TensorProto.BOOL, [], [True]))
    branch = helper.make_node("If", ["yes"], ["y"], then_branch=body, else_branch=body)
    assert not in_place(yes, branch, products=True)
    assert not in_place(yes, branch, MATMUL, products=True)
