"""The noise at each value of a graph: measured against another graph, and predicted for rounding alone."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from onnx import ModelProto, shape_inference

import graphs
from bf16kit.numerics.rounding import to_bf16, to_fp32
from converter.verify.layernoise import ROUNDING, Graph, Power, Rounded, compare, predicted


def model_of(proto: ModelProto) -> ir.Model:
    return ir.serde.deserialize_model(shape_inference.infer_shapes(proto))


@pytest.mark.parametrize("spread", ["normal", "lognormal", "uniform"])
def test_the_noise_of_rounding_is_the_derived_constant(spread: str) -> None:
    """It holds within 1 dB for every distribution, because only the spread of the significands matters."""
    values = getattr(np.random.default_rng(0), spread)(size=1 << 18).astype(np.float32)
    added = np.square(to_fp32(to_bf16(values)).astype(np.float64) - values).sum() / np.square(values, dtype=float).sum()
    assert abs(10 * math.log10(added / ROUNDING)) < 1


WEIGHT = Rounded(frozenset({"w"}), frozenset())
READING = Rounded(frozenset({"w"}), frozenset(), frozenset({"first", "second"}))
SCORES = Rounded(frozenset(), frozenset(), frozenset({"scores"}))
NODES = Rounded(frozenset({"w"}), frozenset({"first", "relu"}))


@pytest.mark.parametrize(
    ("last", "rounded", "means", "expected"),
    [
        ("y = Relu (b)", WEIGHT, {}, {"a": 1, "b": 2, "y": 2}),  # that of products adds up, activations pass it on
        ("y = Add (a, b)", WEIGHT, {"a": 3, "b": 1}, {"y": 1.25}),  # terms weigh by their power
        ("y = Sub (a, b)", WEIGHT, {"a": 1, "b": 1}, {"y": 1.5}),  # a difference is not expected to cancel
        ("y = Mul (a, a)", WEIGHT, {}, {"y": 4}),  # a square doubles the error
        ("y = Relu (b)", READING, {}, {"a": 2, "b": 4}),  # activations are rounded once, results are not
        ("[scores] y = MatMul (a, b)", SCORES, {}, {"y": 2}),  # both computed matrices are rounded
        ("[relu] y = Relu (a)", NODES, {}, {"a": 3, "y": 3}),  # a bf16 node rounds input and result; Relu adds none
    ],
)
def test_the_predicted_noise_in_units_of_one_rounding(
    last: str, rounded: Rounded, means: dict[str, float], expected: dict[str, float]
) -> None:
    text = f"(float[n, 4] x) => (float[n, 4] y) {{ [first] a = MatMul (x, w) [second] b = MatMul (a, w) {last} }}"
    graph = model_of(graphs.parsed(text, w=graphs.values(4, 4))).graph
    found = predicted(graph, rounded, lambda value: means.get(value.name or "", math.nan))
    ratios = {value.name: ratio / ROUNDING for value, ratio in found.items()}
    assert {name: ratios[name] for name in expected} == pytest.approx(expected)


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
