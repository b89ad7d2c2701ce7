"""The converter notes nodes whose types cannot be inferred, because they stay fp32."""

from __future__ import annotations

from pathlib import Path

import onnx
from converting import ONNX_ONLY, Cli
from onnx import helper

import graphs


def test_nodes_of_unknown_type_are_named_in_a_note(cli: Cli, target: Path, tmp_path: Path) -> None:
    """``Inverse`` is an operator of ONNX Runtime without a schema that inference could use."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"], name="product"),
        helper.make_node("Inverse", ["m"], ["g"], name="inverse", domain="com.microsoft"),
        helper.make_node("MatMul", ["g", "v"], ["y"], name="second"),
    ]
    held = [graphs.initializer("w", graphs.values(32, 32)), graphs.initializer("v", graphs.values(32, 32, seed=1))]
    model = graphs.model(nodes, [graphs.edge("x", [32, 32])], [graphs.edge("y", [32, 32])], held)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    onnx.save(model, tmp_path / "unknown.onnx")
    arguments = ("--allow-over-budget", "--no-search", *ONNX_ONLY)
    out = cli("checkpoint", tmp_path / "unknown.onnx", "--out", target, *arguments).published().out
    assert "the output types of 1 of 3 nodes could not be inferred, the first 'inverse' (Inverse)" in out


def test_there_is_no_note_if_all_types_are_known(cli: Cli, onnx_file: Path, target: Path) -> None:
    assert "could not be inferred" not in cli("checkpoint", onnx_file, "--out", target, *ONNX_ONLY).published().out
