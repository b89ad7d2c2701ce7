"""A graph with a switch for each rounding: off, the graph equals the original; on, that node or weight is rounded."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from lowered import specs
from onnx import TensorProto, helper, shape_inference

import graphs
from converter.islands.switches import Bf16, Switched
from converter.source import Array
from converter.verify.running import open_fp32_graph

X = graphs.values(4, 16)


def rounded(array: Array) -> Array:
    return array.astype(ml_dtypes.bfloat16).astype(np.float32)


def run(model: ir.Model, on: Bf16, switched: Bf16) -> Array:
    """Return the output of ``model`` for X, with all roundings of ``switched`` switched and those of ``on`` on."""
    made = Switched(model, switched)
    inputs, outputs = specs(model.graph.inputs), specs(model.graph.outputs)
    runtime = open_fp32_graph(made.model, (*inputs, made.spec), (*outputs, *made.shape_specs))
    return runtime.run({"x": X, made.spec.name: made.positions(on)}, ["y"])["y"]


def answer(nodes: frozenset[str], weights: frozenset[str]) -> Array:
    """Return the output of the switched MLP with ``nodes`` and ``weights`` on."""
    model = ir.from_proto(graphs.mlp())
    every = Bf16(frozenset(node.name or "" for node in model.graph), frozenset({"w0", "w1"}))
    return run(model, Bf16(nodes, weights), every)


def expected(w0: Array, w1: Array) -> Array:
    b0, b1 = (graphs.values(n, seed=seed, scale=0.1) for n, seed in ((32, 1), (16, 3)))
    return np.asarray(np.maximum(X @ w0 + b0, 0) @ w1 + b1)


W0, W1 = graphs.values(16, 32, seed=0), graphs.values(32, 16, seed=2)
NONE: frozenset[str] = frozenset()


def test_with_all_switches_off_the_graph_equals_the_original() -> None:
    np.testing.assert_allclose(answer(NONE, NONE), expected(W0, W1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weights", [{"w0"}, {"w1"}, {"w0", "w1"}])
def test_each_weight_has_a_switch_of_its_own(weights: set[str]) -> None:
    w0, w1 = (rounded(w) if name in weights else w for name, w in (("w0", W0), ("w1", W1)))
    np.testing.assert_allclose(answer(NONE, frozenset(weights)), expected(w0, w1), rtol=1e-5, atol=1e-6)


def test_a_node_that_is_switched_on_rounds_its_result() -> None:
    found = answer(frozenset({"add1"}), NONE)
    assert np.array_equal(found, rounded(found))
    assert not np.array_equal(found, answer(NONE, NONE))


def test_a_sequence_of_tensors_has_no_switch() -> None:
    """It has the dtype of its tensors, and cannot be cast as they are."""
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["m"], name="product"),
        helper.make_node("SplitToSequence", ["m"], ["parts"], axis=1, name="split"),
        helper.make_node("SequenceAt", ["parts", "first"], ["part"], name="first_part"),
        helper.make_node("Mul", ["part", "part"], ["y"], name="square"),
    ]
    held = [graphs.initializer("w0", W0), helper.make_tensor("first", TensorProto.INT64, [], [0])]
    proto = graphs.model(nodes, [graphs.edge("x", ["n", 16])], [graphs.edge("y", ["n", 1])], held)
    model = ir.from_proto(shape_inference.infer_shapes(proto))
    every = Bf16(frozenset(node.name or "" for node in model.graph), frozenset({"w0"}))
    np.testing.assert_allclose(run(model, Bf16(), every), (X @ W0)[:, :1] ** 2, rtol=1e-5, atol=1e-6)
