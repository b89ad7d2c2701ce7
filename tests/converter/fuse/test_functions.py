from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from layers import ACTIVATIONS, Array, batch, layer, ours
from lowered import Lowered, lower
from onnx import ModelProto, helper

import graphs
from bf16kit.runtime.loading import load
from bf16kit.runtime.ort.kernel import VARIABLE


def _without_kernel(made: Lowered, monkeypatch: pytest.MonkeyPatch) -> Array:
    monkeypatch.setenv(VARIABLE, "off")
    return load(made.artifact, "cpu").run(batch())["y"]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("layout", "n"), [("panels", 64), ("panels", 50), ("panels", 20), ("transposed", 50)])
def test_every_variant_gives_float64_s_result_with_and_without_the_kernel(
    layout: str, n: int, bias: bool, activation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = lower(tmp_path / "m" / "1", layer(n, layout, bias=bias, activation=activation))
    assert [node.name for node in ours(made)] == ["product"]
    weight = made.artifact.tensor("w").astype(np.float64)
    total = batch()["x"].astype(np.float64) @ (weight.T if layout == "transposed" else weight)
    expected = ACTIVATIONS[activation][1](total + (graphs.values(n, seed=2) if bias else 0))
    fallback = _without_kernel(made, monkeypatch)
    np.testing.assert_allclose(fallback, expected, rtol=1e-5, atol=4e-6)
    monkeypatch.delenv(VARIABLE)
    np.testing.assert_allclose(made.run_kernel(batch())["y"], expected, rtol=1e-5, atol=4e-6)


def test_the_graph_is_plain_onnx_that_checks_and_loads_without_bf16kit(tmp_path: Path) -> None:
    made = lower(tmp_path / "m" / "1", layer(50, "panels", bias=True, activation="silu"))
    path = made.artifact.file("cpu.onnx")
    onnx.checker.check_model(str(path), full_check=True)
    model = onnx.load(path, load_external_data=False)
    assert model.ir_version >= 8
    assert [function.name for function in model.functions] == ["MatMul_panels_tail_bias_silu"]
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(["y"], batch())[0], made.run_cpu(batch())["y"], rtol=1e-5, atol=4e-6)


@pytest.mark.parametrize("opset", [13, 17, 20, 22, 24])
def test_functions_are_written_in_the_operators_of_the_model_s_own_opset(opset: int, tmp_path: Path) -> None:
    for activation in ("gelu", "gelu_tanh"):
        proto = _written_out(activation)
        proto.opset_import[0].version = opset
        target = tmp_path / activation / "1"
        made = lower(target, proto)
        assert [helper.get_attribute_value(a) for n in ours(made) for a in n.attribute if a.name == "activation"] == [
            activation.encode()
        ]
        onnx.checker.check_model(str(made.artifact.file("cpu.onnx")), full_check=True)
        session = onnxruntime.InferenceSession(str(made.artifact.file("cpu.onnx")), providers=["CPUExecutionProvider"])
        feeds = {"x": graphs.values(3, 16, seed=5)}
        np.testing.assert_allclose(session.run(["y"], feeds)[0], made.run_source(feeds)["y"], atol=2e-2)


def _written_out(activation: str) -> ModelProto:
    """Return x [batch, 16] → MatMul → Gelu in elementary operators → y."""
    gelu = [
        helper.make_node("Div", ["m", "root2"], ["d"]),
        helper.make_node("Erf", ["d"], ["e"]),
        helper.make_node("Add", ["e", "one"], ["o"]),
    ]
    tanh = [
        helper.make_node("Pow", ["m", "three"], ["p"]),
        helper.make_node("Mul", ["p", "cubic"], ["q"]),
        helper.make_node("Add", ["m", "q"], ["r"]),
        helper.make_node("Mul", ["r", "root"], ["d"]),
        helper.make_node("Tanh", ["d"], ["e"]),
        helper.make_node("Add", ["e", "one"], ["o"]),
    ]
    numbers = {
        "root2": math.sqrt(2),
        "one": 1,
        "half": 0.5,
        "three": 3,
        "cubic": 0.044715,
        "root": math.sqrt(2 / math.pi),
    }
    return graphs.model(
        [
            helper.make_node("MatMul", ["x", "w"], ["m"]),
            *(gelu if activation == "gelu" else tanh),
            helper.make_node("Mul", ["m", "o"], ["half_way"]),
            helper.make_node("Mul", ["half_way", "half"], ["y"]),
        ],
        [graphs.edge("x", ["batch", 16])],
        [graphs.edge("y", ["batch", 32])],
        [
            graphs.initializer("w", graphs.values(16, 32)),
            *(graphs.initializer(name, np.array(value, np.float32)) for name, value in numbers.items()),
        ],
    )
