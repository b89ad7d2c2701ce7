"""Comparing the inner values of two graphs by name."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from onnx import ModelProto

import graphs
from converter.verify.layernoise import Graph, Power, compare


def graph(model: ModelProto, tmp_path: Path) -> Graph:
    from onnx import shape_inference

    return Graph(ir.serde.deserialize_model(shape_inference.infer_shapes(model)), tmp_path, {})


def scaled(model: ModelProto, weight: str, factor: float) -> ModelProto:
    copy = ModelProto.FromString(model.SerializeToString())
    tensor = next(t for t in copy.graph.initializer if t.name == weight)
    array = np.frombuffer(tensor.raw_data, np.float32) * np.float32(factor)
    tensor.raw_data = array.tobytes()
    return copy


def test_each_inner_value_is_compared_by_name(tmp_path: Path) -> None:
    """With the first weight 1% too large, its product is 1% off: a power ratio of 1e-4. The output is off as well."""
    model = graphs.mlp()
    feeds = [{"x": graphs.values(4, 16, seed=seed)} for seed in (0, 1)]
    powers = compare(graph(model, tmp_path), graph(scaled(model, "w0", 1.01), tmp_path), feeds)
    assert list(powers) == ["m0", "a0", "h0", "m1", "y"]
    assert powers["m0"].ratio == pytest.approx(1e-4, rel=1e-2)
    assert powers["m0"].count == 2 * 4 * 32
    assert 1e-6 < powers["y"].ratio < 1e-3


def test_a_graph_equals_itself(tmp_path: Path) -> None:
    model = graph(graphs.mlp(), tmp_path)
    assert {power.ratio for power in compare(model, model, [{"x": graphs.values(4, 16)}]).values()} == {0.0}


def test_a_mask_beyond_bf16_is_left_out_and_an_overflow_is_not() -> None:
    power = Power()
    lowest = np.finfo(np.float32).min
    power.add(np.array([1.0, lowest], np.float32), np.array([1.5, -3.3895313892515355e38], np.float32))
    assert (power.count, power.ratio) == (1, 0.25)
    power.add(np.array([3e38], np.float32), np.array([math.inf], np.float32))
    assert power.ratio == math.inf


def test_noise_where_the_reference_is_zero_is_infinite() -> None:
    power = Power()
    power.add(np.zeros(2, np.float32), np.ones(2, np.float32))
    assert power.ratio == math.inf
