"""Golden samples: kept as they were, and judged before an artifact is published."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from converting import ONNX_ONLY, Cli
from onnx import TensorProto, helper
from safetensors.numpy import load_file

import graphs
from converter.proof import golden


def test_scalars_keep_their_shape(tmp_path: Path) -> None:
    golden.write(tmp_path / "g", {"x": np.float32(3.0) * np.ones(())}, {"y": np.ones((2, 3), np.float32).T})
    kept = load_file(tmp_path / "g")
    assert kept["input:x"].shape == ()
    assert kept["output:y"].shape == (3, 2)


def test_a_model_with_a_scalar_output_verifies(tmp_path: Path, target: Path, cli: Cli) -> None:
    """Its golden answer would have another shape than its answer, and the drift between those is infinite."""
    source = graphs.model(
        [
            helper.make_node("MatMul", ["x", "w"], ["h"], name="product"),
            helper.make_node("ReduceSum", ["h"], ["y"], name="sum", keepdims=0),
        ],
        [graphs.edge("x", ["batch", 32])],
        [graphs.edge("y", [])],
        [graphs.initializer("w", graphs.values(32, 32))],
    )
    (tmp_path / "m.onnx").write_bytes(source.SerializeToString())
    cli("checkpoint", tmp_path / "m.onnx", "--out", target, *ONNX_ONLY, "--budget", "relative_l2=0.1").published()
    assert "every digest matches" in cli("verify", target).published().out


def test_one_sample_over_budget_is_not_hidden_by_the_mean_of_many(tmp_path: Path, target: Path, cli: Cli) -> None:
    """A server judges the golden samples alone: what it would never call ready is not published."""
    weight = np.full((32, 32), 1.0, np.float32)
    weight[0] = 1 + 2.0**-8.5  # the only row that rounding changes
    (tmp_path / "m.onnx").write_bytes(
        graphs.model(
            [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")],
            [graphs.edge("x", ["batch", 32], TensorProto.FLOAT)],
            [graphs.edge("y", ["batch", 32])],
            [graphs.initializer("w", weight)],
        ).SerializeToString()
    )
    samples = tmp_path / "samples"
    samples.mkdir()
    for index in range(50):
        x = np.zeros((1, 32), np.float32)
        x[0, 0 if index == 0 else 1] = 1
        np.savez(samples / f"{index:02}.npz", x=x)
    convert = ("checkpoint", tmp_path / "m.onnx", "--out", target, *ONNX_ONLY, "--samples", samples)
    strict = (*convert, "--budget", "relative_l2=1e-3", "--profile", "cpu")
    cli(*strict, "--no-search").refused(1, "relative_l2", "on the golden samples alone")
    assert not target.exists()
    assert "1 island in fp32 mended that" in cli(*strict).published().out


def test_an_artifact_without_a_residual_says_that_it_cannot_be_restored(tmp_path: Path, target: Path, cli: Cli) -> None:
    (tmp_path / "m.onnx").write_bytes(graphs.mlp((32, 32)).SerializeToString())
    cli("checkpoint", tmp_path / "m.onnx", "--out", target, *ONNX_ONLY, "--no-residual").published()
    cli("restore", target, "--out", tmp_path / "r.safetensors").refused(2, "--no-residual")
    assert not (tmp_path / "r.safetensors").exists()


def test_weights_listed_among_the_inputs_are_not_inputs(tmp_path: Path, target: Path, cli: Cli) -> None:
    """Files of IR version 3, which model zoos are full of, list every weight as an input."""
    source = graphs.mlp((32, 32))
    source.ir_version = 3
    source.graph.input.extend(graphs.edge(t.name, list(t.dims)) for t in source.graph.initializer)
    (tmp_path / "m.onnx").write_bytes(source.SerializeToString())
    done = cli("checkpoint", tmp_path / "m.onnx", "--out", target, *ONNX_ONLY).published()
    assert "converted" in done.out


def test_constants_outside_the_directory_of_a_model_are_refused(tmp_path: Path, target: Path, cli: Cli) -> None:
    source = graphs.constant_nodes()
    constant = next(a.t for node in source.graph.node for a in node.attribute if a.HasField("t"))
    graphs.refer(constant, "../elsewhere.bin")
    (tmp_path / "model").mkdir()
    (tmp_path / "elsewhere.bin").write_bytes(bytes(1 << 16))
    (tmp_path / "model" / "m.onnx").write_bytes(source.SerializeToString())
    refused = cli("checkpoint", tmp_path / "model" / "m.onnx", "--out", target, *ONNX_ONLY)
    refused.refused(2, "../elsewhere.bin", "outside the model's directory")
