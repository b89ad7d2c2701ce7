"""Loops, ranges and tensors that are too long or too large to compute are rejected by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

import graphs
from bf16kit.messages.errors import ConversionError
from converter.read import onnx_soundness


def _loop(turns: int | None, hand_on: bool = True) -> ModelProto:
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["go2"]) if hand_on else helper.make_node("Not", ["go"], ["go2"]),
            helper.make_node("Identity", ["h"], ["h2"]),
        ],
        "body",
        [graphs.edge("i", [], TensorProto.INT64), graphs.edge("go", [], TensorProto.BOOL), graphs.edge("h", [2])],
        [graphs.edge("go2", [], TensorProto.BOOL), graphs.edge("h2", [2])],
    )
    constants = [helper.make_tensor("true", TensorProto.BOOL, [], [1])]
    if turns is not None:
        constants.append(helper.make_tensor("turns", TensorProto.INT64, [], [turns]))
    node = helper.make_node("Loop", ["" if turns is None else "turns", "true", "x"], ["y"], name="loop", body=body)
    return graphs.model([node], [graphs.edge("x", [2])], [graphs.edge("y", [2])], constants)


@pytest.mark.parametrize(("turns", "said"), [(None, "never ends"), (2**40, "runs 1099511627776 times")])
def test_a_loop_that_practically_never_ends_is_rejected(tmp_path: Path, turns: int | None, said: str) -> None:
    with pytest.raises(ConversionError, match=f"Loop 'loop' {said}"):
        onnx_soundness.check(tmp_path / "m.onnx", _loop(turns))


@pytest.mark.parametrize(("turns", "hand_on"), [(1000, True), (None, False), (2**40, False)])
def test_a_loop_that_ends_is_accepted(tmp_path: Path, turns: int | None, hand_on: bool) -> None:
    onnx_soundness.check(tmp_path / "m.onnx", _loop(turns, hand_on))


def test_a_range_that_takes_shape_inference_hours_is_rejected(tmp_path: Path) -> None:
    numbers = [helper.make_tensor(name, TensorProto.INT64, [], [v]) for name, v in (("a", 0), ("b", 2**40), ("c", 1))]
    node = helper.make_node("Range", ["a", "b", "c"], ["y"], name="r")
    model = graphs.model([node], [], [graphs.edge("y", ["n"], TensorProto.INT64)], numbers)
    with pytest.raises(ConversionError, match="Range 'r' counts to 1099511627776"):
        onnx_soundness.check(tmp_path / "m.onnx", model)


@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
def test_constants_that_are_not_finite_are_accepted(tmp_path: Path, number: float) -> None:
    """Masks use them: Where(mask, x, −inf)."""
    odd = graphs.initializer("odd", np.array(number, np.float32))
    nodes = [
        helper.make_node("Max", ["x", "odd"], ["y"], name="m"),
        helper.make_node("Range", ["odd", "odd", "odd"], ["z"], name="r"),
    ]
    proto = graphs.model(nodes, [graphs.edge("x", [4])], [graphs.edge("y", [4]), graphs.edge("z", ["n"])], [odd])
    onnx_soundness.check(tmp_path / "m.onnx", proto)


@pytest.mark.parametrize(("op", "inputs"), [("Expand", ["x", "shape"]), ("ConstantOfShape", ["shape"])])
def test_a_value_too_large_for_any_memory_is_rejected(tmp_path: Path, op: str, inputs: list[str]) -> None:
    shape = helper.make_tensor("shape", TensorProto.INT64, [2], [2**20, 2**20])
    node = helper.make_node(op, inputs, ["y"], name="n")
    model = graphs.model([node], [graphs.edge("x", [1])], [graphs.edge("y")], [shape])
    with pytest.raises(ConversionError, match=rf"{op} 'n' makes a tensor of shape \[1048576, 1048576\]"):
        onnx_soundness.check(tmp_path / "m.onnx", model)


@pytest.mark.parametrize("op", ["RandomNormal", "RandomUniform"])
def test_random_numbers_too_large_for_any_memory_are_rejected(tmp_path: Path, op: str) -> None:
    """For a vector of known length, shape inference makes a list of that length."""
    node = helper.make_node(op, [], ["y"], name="n", shape=[2**42])
    model = graphs.model([node], [graphs.edge("x", [1])], [graphs.edge("y")])
    with pytest.raises(ConversionError, match=rf"{op} 'n' makes a tensor of shape \[4398046511104\]"):
        onnx_soundness.check(tmp_path / "m.onnx", model)
    node.attribute[0].ints[:] = [2**20]
    model = graphs.model([node], [graphs.edge("x", [1])], [graphs.edge("y")])
    onnx_soundness.check(tmp_path / "m.onnx", model)
