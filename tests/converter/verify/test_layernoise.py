"""The noise at each value of a graph: measured against another graph, and predicted for rounding alone."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
import pytest
from onnx import ModelProto, shape_inference

import graphs
from bf16kit.numerics.rounding import to_bf16, to_fp32
from converter.verify.layernoise import ROUNDING, Power, Rounded, predicted


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
