"""Nodes that do not match their operators are rejected by name when the file is read."""

from __future__ import annotations

from pathlib import Path

import pytest
from onnx import AttributeProto, ModelProto, NodeProto, helper

import graphs
from bf16kit.messages.errors import SourceError
from converter.read import onnx_soundness


def _with(*nodes: NodeProto) -> ModelProto:
    model = graphs.mlp()
    model.graph.node.extend(nodes)
    return model


_LIES: dict[str, tuple[NodeProto, str]] = {
    "an attribute of another type": (
        helper.make_node("Softmax", ["y"], ["z"], name="soft", axis="last"),
        "node 'soft': attribute 'axis' of 'Softmax' is STRING, expected INT",
    ),
    "an empty attribute": (
        NodeProto(
            op_type="Constant", output=["z"], attribute=[AttributeProto(name="value", type=AttributeProto.TENSOR)]
        ),
        "node 'z': attribute 'value' of 'Constant' is empty",
    ),
    "an attribute twice": (
        NodeProto(op_type="Softmax", name="s", attribute=[AttributeProto(name="axis", type=AttributeProto.INT)] * 2),
        "node 's' has two attributes with the same name",
    ),
    "an attribute that is lacking": (
        helper.make_node("Cast", ["y"], ["z"], name="c"),
        "node 'c' lacks the attribute 'to' of 'Cast'",
    ),
    "too few inputs": (
        helper.make_node("MatMul", ["y"], ["z"], name="m"),
        "node 'm' has 1 input, and 'MatMul' needs 2",
    ),
    "too many inputs": (
        helper.make_node("Clip", ["y", "b1", "b1", "b1"], ["z"], name="c"),
        "node 'c' has 4 inputs, and 'Clip' needs 1 to 3",
    ),
    "no inputs where any number will do": (
        helper.make_node("Concat", [], ["z"], name="c", axis=0),
        "node 'c' has 0 inputs, and 'Concat' needs 1 or more",
    ),
    "an input left out that has to be": (
        helper.make_node("MatMul", ["", "w0"], ["z"]),
        "node 'z' lacks the input 'A' of 'MatMul'",
    ),
    "no outputs": (
        helper.make_node("Relu", ["y"], [], name="r"),
        "node 'r' has 0 outputs, and 'Relu' needs 1",
    ),
    "too many outputs": (
        helper.make_node("Relu", ["y"], ["z", "zz"], name="r"),
        "node 'r' has 2 outputs, and 'Relu' needs 1",
    ),
    "an output left out that has to be": (
        helper.make_node("Relu", ["y"], [""], name="r"),
        "node 'r' lacks the output 'Y' of 'Relu'",
    ),
}


@pytest.mark.parametrize("lie", _LIES)
def test_a_node_that_does_not_match_its_operator_is_rejected_by_name(tmp_path: Path, lie: str) -> None:
    node, said = _LIES[lie]
    with pytest.raises(SourceError, match=f"m.onnx: damaged: {said}"):
        onnx_soundness.check(tmp_path / "m.onnx", _with(node))


def test_a_node_of_a_body_is_checked_too(tmp_path: Path) -> None:
    model = graphs.if_branches()
    body = model.graph.node[0].attribute[0].g
    matmul = next(node for node in body.node if node.op_type == "MatMul")
    del matmul.input[1]
    with pytest.raises(SourceError, match=f"node '{matmul.name}' has 1 input, and 'MatMul' needs 2"):
        onnx_soundness.check(tmp_path / "m.onnx", model)


_SOUND: dict[str, NodeProto] = {
    "optional inputs left out in the middle": helper.make_node("Clip", ["y", "", "low"], ["z"]),
    "optional inputs left out at the end": helper.make_node("Clip", ["y", "", ""], ["z"]),
    "optional outputs left out": helper.make_node("LSTM", ["s", "w", "r"], ["", "h"], hidden_size=4),
    "many inputs": helper.make_node("Concat", ["y"] * 50, ["z"], axis=0),
    "another domain's operator": helper.make_node("MatMul", ["y"], ["z"], domain="com.microsoft"),
    "an operator that nobody knows": helper.make_node("Nope", [], []),
    "ONNX's domain by its name": helper.make_node("Relu", ["y"], ["z"], domain="ai.onnx"),
}


@pytest.mark.parametrize("kind", _SOUND)
def test_nodes_that_their_operator_allows_are_accepted(tmp_path: Path, kind: str) -> None:
    onnx_soundness.check(tmp_path / "m.onnx", _with(_SOUND[kind]))


def test_nodes_are_checked_by_the_models_opset(tmp_path: Path) -> None:
    """Clip has its bounds as attributes up to opset 10, and as inputs from opset 11 on."""
    old, new = (
        _with(helper.make_node("Clip", ["y"], ["z"], min=0.0)),
        _with(helper.make_node("Clip", ["y", "b1"], ["z"])),
    )
    for model in (old, new):
        model.opset_import[0].version = 7
    onnx_soundness.check(tmp_path / "m.onnx", old)
    with pytest.raises(SourceError, match="node 'z' has 2 inputs, and 'Clip' needs 1"):
        onnx_soundness.check(tmp_path / "m.onnx", new)


def test_operators_of_a_future_opset_may_have_more_inputs(tmp_path: Path) -> None:
    model = _with(helper.make_node("Relu", ["y", "b1"], ["z"]))
    model.opset_import[0].version = 10_000
    onnx_soundness.check(tmp_path / "m.onnx", model)


def _calling(function_opset: int, node: NodeProto, name: str = "F", domain: str = "own") -> ModelProto:
    opsets = [helper.make_opsetid("", function_opset)]
    model = _with(helper.make_node(name, ["y"], ["z"], domain=domain))
    model.functions.append(helper.make_function(domain, name, ["a"], ["b"], [node], opsets))
    return model


def test_nodes_of_a_function_are_checked_by_its_own_opset(tmp_path: Path) -> None:
    node = helper.make_node("Clip", ["a", "a"], ["b"], name="clip")
    onnx_soundness.check(tmp_path / "m.onnx", _calling(11, node))
    with pytest.raises(SourceError, match="node 'clip' has 2 inputs, and 'Clip' needs 1"):
        onnx_soundness.check(tmp_path / "m.onnx", _calling(7, node))


def test_a_function_with_an_operators_name_is_called_as_it_is_defined(tmp_path: Path) -> None:
    model = _calling(graphs.OPSET, helper.make_node("Relu", ["a"], ["b"]), "Gemm", "")
    onnx_soundness.check(tmp_path / "m.onnx", model)
