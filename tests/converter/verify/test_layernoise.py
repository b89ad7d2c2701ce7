"""The predicted SQNR: the noise that rounding should have added at each value of a graph."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
import pytest
from onnx import ModelProto, NodeProto, helper, shape_inference

import graphs
from bf16kit.numerics.rounding import to_bf16, to_fp32
from converter.verify.layernoise import ROUNDING, Rounded, depth, predicted


def graph(model: ModelProto) -> ir.Graph:
    return ir.serde.deserialize_model(shape_inference.infer_shapes(model)).graph


def noise(model: ModelProto, rounded: Rounded, **means: float) -> dict[str | None, float]:
    found = predicted(graph(model), rounded, lambda value: means.get(value.name or "", math.nan))
    return {value.name: ratio / ROUNDING for value, ratio in found.items()}


def two_inputs(node: NodeProto) -> ModelProto:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("MatMul", ["a", "w"], ["b"]), node]
    edges = [graphs.edge("x", ["n", 4])], [graphs.edge("y", ["n", 4])]
    return graphs.model(nodes, *edges, [graphs.initializer("w", graphs.values(4, 4))])


@pytest.mark.parametrize("spread", ["normal", "lognormal", "uniform"])
def test_the_noise_of_rounding_is_the_derived_constant(spread: str) -> None:
    """It holds within 1 dB for every distribution, because only the spread of the significands matters."""
    values = getattr(np.random.default_rng(0), spread)(size=1 << 18).astype(np.float32)
    added = np.square(to_fp32(to_bf16(values)).astype(np.float64) - values).sum() / np.square(values, dtype=float).sum()
    assert abs(10 * math.log10(added / ROUNDING)) < 1


def test_noise_of_products_adds_up_and_activations_pass_it_on() -> None:
    found = noise(graphs.mlp((16, 32, 16)), Rounded(frozenset({"w0", "w1"}), frozenset()), m0=9, b0=0, m1=9, b1=0)
    assert [found[name] for name in ("m0", "a0", "h0", "m1", "y")] == pytest.approx([1, 1, 1, 2, 2])


def test_a_sum_weighs_its_terms_by_their_power() -> None:
    node = helper.make_node("Add", ["a", "b"], ["y"])
    assert noise(two_inputs(node), Rounded(frozenset({"w"}), frozenset()), a=3, b=1)["y"] == pytest.approx(1.25)


def test_a_difference_is_not_expected_to_cancel() -> None:
    node = helper.make_node("Sub", ["a", "b"], ["y"])
    assert noise(two_inputs(node), Rounded(frozenset({"w"}), frozenset()), a=1, b=1)["y"] == pytest.approx(1.5)


def test_a_square_doubles_the_error() -> None:
    node = helper.make_node("Mul", ["a", "a"], ["y"])
    assert noise(two_inputs(node), Rounded(frozenset({"w"}), frozenset()))["y"] == pytest.approx(4)


def test_a_product_that_rounds_its_activations_adds_that_noise_once() -> None:
    """Its result is not rounded. The next product rounds its input all the same; no weight is rounded twice."""
    reading = frozenset({"matmul0", "matmul1"})
    found = noise(graphs.mlp((16, 32, 16)), Rounded(frozenset({"w0", "w1"}), frozenset(), reading), m0=9, m1=9)
    assert [found[name] for name in ("m0", "m1")] == pytest.approx([2, 4])


def test_a_product_of_two_computed_matrices_adds_the_noise_of_rounding_both() -> None:
    model = two_inputs(helper.make_node("MatMul", ["a", "b"], ["y"], name="scores"))
    assert noise(model, Rounded(frozenset(), frozenset(), frozenset({"scores"})))["y"] == pytest.approx(2)


def test_a_bf16_node_rounds_its_input_and_its_result() -> None:
    """x is rounded, the weight is bf16, and the result is rounded: three times the noise. Relu adds none."""
    model = two_inputs(helper.make_node("Relu", ["a"], ["y"], name="relu"))
    model.graph.node[0].name = "product"
    found = noise(model, Rounded(frozenset({"w"}), frozenset({"product", "relu"})))
    assert [found["a"], found["y"]] == pytest.approx([3, 3])


def test_depth_counts_the_products_on_the_longest_path() -> None:
    found = {value.name: d for value, d in depth(graph(two_inputs(helper.make_node("Add", ["a", "b"], ["y"])))).items()}
    assert found == {"a": 1, "b": 2, "y": 2}
