"""The outputs of a source itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from architectures import Mlp, seeded
from onnx import TensorProto, helper

import graphs
from bf16kit.messages.errors import RuntimeFailure
from bf16kit.numerics.tensors import TensorSpec
from converter.read import oracles
from converter.read.torch.onnx_export import adapt
from converter.source import FP32_ROUNDOFF

X = np.random.default_rng(0).standard_normal((3, 16)).astype(np.float32)
SPEC = (TensorSpec("x", "float32", ("batch", 16)),)


def test_running_a_module_changes_neither_its_feed_nor_torchs_settings() -> None:
    module = seeded(Mlp())
    oracle = oracles.of_module(adapt(module, SPEC))
    feed = X.copy()
    feed.flags.writeable = False
    torch.set_float32_matmul_precision("medium")
    try:
        (answer,) = oracle([{"x": feed}])
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    with torch.no_grad():
        np.testing.assert_array_equal(answer["output"], module(torch.from_numpy(X)).numpy())


def test_a_module_that_fails_is_reported_in_one_line() -> None:
    class Picky(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) == 3:
                raise ValueError("three rows are too many")
            return super().forward(x)

    oracle = oracles.of_module(adapt(seeded(Picky()), SPEC))
    with pytest.raises(RuntimeFailure, match="the torch module failed on it: ValueError: three rows are too many"):
        oracle([{"x": X}])


def test_an_onnx_file_runs_with_its_own_weights(tmp_path: Path) -> None:
    onnx.save(graphs.mlp(), tmp_path / "m.onnx")
    oracle = oracles.of_onnx(tmp_path / "m.onnx", ir.load(tmp_path / "m.onnx"))
    weights = graphs.weights_of(graphs.mlp())
    (answer,) = oracle([{"x": X}])
    expected = np.maximum(X @ weights["w0"] + weights["b0"], 0) @ weights["w1"] + weights["b1"]
    np.testing.assert_allclose(answer["y"], expected, rtol=1e-5, atol=1e-6)
    assert oracle.roundoff == FP32_ROUNDOFF


def test_a_file_that_onnx_runtime_does_not_load_is_reported(tmp_path: Path) -> None:
    node = helper.make_node("NoSuchOperator", ["x"], ["y"])
    onnx.save(graphs.model([node], [graphs.edge("x", [1])], [graphs.edge("y", [1])]), tmp_path / "m.onnx")
    with pytest.raises(RuntimeFailure, match=r"cannot load m\.onnx"):
        oracles.of_onnx(tmp_path / "m.onnx", ir.load(tmp_path / "m.onnx"))([{"x": np.ones(1, np.float32)}])


def test_a_file_with_fp16_inputs_gets_feeds_in_fp16(tmp_path: Path) -> None:
    x, y = (graphs.edge(name, ["n", 16], TensorProto.FLOAT16) for name in "xy")
    onnx.save(graphs.model([helper.make_node("Add", ["x", "x"], ["y"])], [x], [y]), tmp_path / "m.onnx")
    oracle = oracles.of_onnx(tmp_path / "m.onnx", ir.load(tmp_path / "m.onnx"))
    (answer,) = oracle([{"x": X}])
    np.testing.assert_array_equal(answer["y"], X.astype(np.float16) * np.float16(2))
    assert oracle.roundoff == 2.0**-11


@pytest.mark.parametrize(
    ("cast", "roundoff"),
    [
        (helper.make_node("Cast", ["x"], ["c"], to=TensorProto.FLOAT16), 2.0**-11),
        (helper.make_node("Cast", ["x"], ["c"], to=99), FP32_ROUNDOFF),
        (helper.make_node("Cast", ["x"], ["c"]), FP32_ROUNDOFF),
        (helper.make_node("Cast", ["x"], ["c"], domain="own", to="half"), FP32_ROUNDOFF),
    ],
)
def test_only_onnxs_own_cast_to_fp16_raises_the_roundoff(tmp_path: Path, cast: onnx.NodeProto, roundoff: float) -> None:
    """The file is examined before ONNX Runtime decides whether it can run."""
    nodes = [cast, helper.make_node("Exp", ["c"], ["y"])]
    proto = graphs.model(nodes, [graphs.edge("x", [4])], [graphs.edge("y", [4])])
    assert oracles.of_onnx(tmp_path / "m.onnx", ir.from_proto(proto)).roundoff == roundoff
