"""The noise at each value of a graph: measured against another graph, and predicted for rounding alone."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from onnx import ModelProto, NodeProto, helper, shape_inference

import graphs
from bf16kit.numerics.rounding import to_bf16, to_fp32
from converter.verify.layernoise import ROUNDING, Graph, Power, Rounded, compare, depth, predicted


def model_of(proto: ModelProto) -> ir.Model:
    return ir.serde.deserialize_model(shape_inference.infer_shapes(proto))


def noise(model: ModelProto, rounded: Rounded, **means: float) -> dict[str | None, float]:
    found = predicted(model_of(model).graph, rounded, lambda value: means.get(value.name or "", math.nan))
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


@pytest.mark.parametrize(
    ("op", "read", "means", "expected"),
    [
        ("Add", "ab", {"a": 3, "b": 1}, 1.25),  # terms weigh by their power
        ("Sub", "ab", {"a": 1, "b": 1}, 1.5),  # a difference is not expected to cancel
        ("Mul", "aa", {}, 4),  # a square doubles the error
    ],
)
def test_noise_propagates_by_power(op: str, read: str, means: dict[str, float], expected: float) -> None:
    model = two_inputs(helper.make_node(op, [*read], ["y"]))
    assert noise(model, Rounded(frozenset({"w"}), frozenset()), **means)["y"] == pytest.approx(expected)


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
    found = depth(model_of(two_inputs(helper.make_node("Add", ["a", "b"], ["y"]))).graph)
    assert {value.name: products for value, products in found.items()} == {"a": 1, "b": 2, "y": 2}


def scaled(model: ModelProto, weight: str, factor: float) -> ModelProto:
    copy = ModelProto.FromString(model.SerializeToString())
    tensor = next(t for t in copy.graph.initializer if t.name == weight)
    array = np.frombuffer(tensor.raw_data, np.float32) * np.float32(factor)
    tensor.raw_data = array.tobytes()
    return copy


def test_each_inner_value_is_compared_by_name(tmp_path: Path) -> None:
    """With the first weight 1% too large, its product is 1% off: a power ratio of 1e-4. The output is off as well."""
    feeds = [{"x": graphs.values(4, 16, seed=seed)} for seed in (0, 1)]
    own, other = (Graph(model_of(proto), tmp_path, {}) for proto in (graphs.mlp(), scaled(graphs.mlp(), "w0", 1.01)))
    powers = compare(own, other, feeds)
    assert list(powers) == ["m0", "a0", "h0", "m1", "y"]
    assert powers["m0"].ratio == pytest.approx(1e-4, rel=1e-2)
    assert powers["m0"].count == 2 * 4 * 32
    assert 1e-6 < powers["y"].ratio < 1e-3
    assert {power.ratio for power in compare(own, own, feeds).values()} == {0.0}


def test_a_mask_beyond_bf16_is_left_out_and_an_overflow_is_not() -> None:
    power = Power()
    lowest = np.finfo(np.float32).min
    power.add(np.array([1.0, lowest], np.float32), np.array([1.5, -3.3895313892515355e38], np.float32))
    assert (power.count, power.ratio) == (1, 0.25)
    power.add(np.array([3e38], np.float32), np.array([math.inf], np.float32))
    assert power.ratio == math.inf
    zero = Power()
    zero.add(np.zeros(2, np.float32), np.ones(2, np.float32))
    assert zero.ratio == math.inf
