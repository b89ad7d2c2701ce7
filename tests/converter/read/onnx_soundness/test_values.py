"""Values that are defined twice, not at all, or differently from their declaration are rejected by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from onnx import GraphProto, ModelProto, SparseTensorProto, TensorProto, helper

import graphs
from bf16kit.messages.errors import ConversionError, RuntimeFailure, SourceError
from bf16kit.runtime.ort.session import open_session
from converter.read import onnx_soundness


def _weight(model: ModelProto) -> TensorProto:
    return model.graph.initializer[0]


def _declare(model: ModelProto, dtype: int, shape: list[int | str]) -> None:
    """Declare the first weight, which is [16, 32], as an input as well."""
    model.graph.input.append(graphs.edge("w0", shape, dtype))


_LIES: dict[str, tuple[Callable[[ModelProto], object], str]] = {
    "two of a name": (lambda m: m.graph.initializer.append(_weight(m)), "'w0' is defined twice"),
    "a node that gives a weight": (lambda m: m.graph.node[0].output.append("w0"), "'w0' is defined twice"),
    "a nameless weight": (lambda m: setattr(_weight(m), "name", ""), "has no name"),
    "an output that nothing gives": (
        lambda m: setattr(m.graph.output[0], "name", "z"),
        "no node, input or initializer gives the output 'z'",
    ),
    "a declared dtype": (
        lambda m: _declare(m, TensorProto.DOUBLE, [16, 32]),
        r"'w0' is a tensor of FLOAT\[16, 32\], but is declared as an input of another type or shape",
    ),
    "a declared size": (lambda m: _declare(m, TensorProto.FLOAT, [16, 33]), "another type or shape"),
    "a declared rank": (lambda m: _declare(m, TensorProto.FLOAT, [16]), "another type or shape"),
    "a declared sequence": (
        lambda m: m.graph.input.append(
            helper.make_value_info("w0", helper.make_sequence_type_proto(graphs.edge("", []).type))
        ),
        "another type or shape",
    ),
}


@pytest.mark.parametrize("lie", _LIES)
def test_an_invalid_value_is_rejected_by_name(tmp_path: Path, lie: str) -> None:
    make, said = _LIES[lie]
    model = graphs.mlp()
    make(model)
    with pytest.raises(SourceError, match=said) as raised:
        onnx_soundness.check(tmp_path / "m.onnx", model)
    assert str(raised.value).startswith(f"{tmp_path}/m.onnx: ")


@pytest.mark.parametrize("shape", [[16, 32], ["a", "b"], [-1, 32]])
def test_a_weight_may_be_declared_with_free_dimensions(tmp_path: Path, shape: list[int | str]) -> None:
    model = graphs.mlp()
    _declare(model, TensorProto.FLOAT, shape)
    onnx_soundness.check(tmp_path / "m.onnx", model)


def _body(model: ModelProto, place: int = 0) -> GraphProto:
    return model.graph.node[0].attribute[place].g


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nowhere", "nothing"),
        ("then_y", "the other body"),
        ("y", "the node whose body it is"),
        ("late", "a later node"),
    ],
)
def test_a_bodys_output_must_come_from_a_value_that_the_body_can_see(tmp_path: Path, name: str, why: str) -> None:
    model = graphs.if_branches()
    if name == "then_y":
        assert name in _body(model, 1).node[0].output, "the case tests nothing"
    model.graph.node.append(helper.make_node("Relu", ["x"], ["late"]))
    _body(model).output[0].name = name
    with pytest.raises(SourceError, match=f"no node, input or initializer gives the output '{name}'"):
        onnx_soundness.check(tmp_path / "m.onnx", model)


@pytest.mark.parametrize("name", ["x", "captured", "early"])
def test_a_body_that_returns_an_outer_value_is_rejected_with_the_remedy(tmp_path: Path, name: str) -> None:
    """ONNX Runtime rejects it, too."""
    model = graphs.if_branches()
    model.graph.node.insert(0, helper.make_node("Relu", ["x"], ["early"]))
    body = model.graph.node[1].attribute[0].g
    body.output[0].name = name
    with pytest.raises(ConversionError, match=f"a body returns '{name}', .* put an Identity between"):
        onnx_soundness.check(tmp_path / "m.onnx", model)
    with pytest.raises(RuntimeFailure, match="outer scope value being returned directly"):
        open_session(model.SerializeToString())
    body.node.append(helper.make_node("Identity", [name], ["between"]))
    body.output[0].name = "between"
    onnx_soundness.check(tmp_path / "m.onnx", model)


def test_a_sparse_initializer_gives_a_value(tmp_path: Path) -> None:
    model = graphs.mlp()
    value = TensorProto(name="sparse", data_type=TensorProto.FLOAT, dims=[1], float_data=[1.0])
    index = TensorProto(data_type=TensorProto.INT64, dims=[1], int64_data=[0])
    model.graph.sparse_initializer.append(SparseTensorProto(values=value, indices=index, dims=[4]))
    model.graph.output.append(graphs.edge("sparse", [4]))
    onnx_soundness.check(tmp_path / "m.onnx", model)


def test_a_function_that_is_defined_twice_is_rejected(tmp_path: Path) -> None:
    opsets = [helper.make_opsetid("", graphs.OPSET)]
    model = graphs.mlp()
    for overload in ("", "other", ""):
        onnx_soundness.check(tmp_path / "m.onnx", model)
        node = helper.make_node("Relu", ["a"], ["b"])
        model.functions.append(helper.make_function("own", "F", ["a"], ["b"], [node], opsets, overload=overload))
    with pytest.raises(SourceError, match="function 'F' is defined twice"):
        onnx_soundness.check(tmp_path / "m.onnx", model)


def test_a_functions_output_must_be_computed_inside_it(tmp_path: Path) -> None:
    opsets = [helper.make_opsetid("", graphs.OPSET)]
    model = graphs.mlp()
    model.functions.append(
        helper.make_function("own", "F", ["a"], ["y"], [helper.make_node("Relu", ["a"], ["b"])], opsets)
    )
    with pytest.raises(SourceError, match="no node, input or initializer gives the output 'y'"):
        onnx_soundness.check(tmp_path / "m.onnx", model)


@pytest.mark.parametrize(
    "build", [graphs.mlp, graphs.conv_bn, graphs.if_branches, graphs.loop, graphs.constant_nodes, graphs.embedding]
)
def test_sound_files_are_accepted(tmp_path: Path, build: Callable[[], ModelProto]) -> None:
    onnx_soundness.check(tmp_path / "m.onnx", build())
