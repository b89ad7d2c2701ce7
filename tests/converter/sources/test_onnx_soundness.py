"""ONNX files that lie: each is refused where it is read, by the name of what lies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, helper

import graphs
from bf16kit.errors import ConversionError, SourceError
from converter.sources import onnx_soundness
from converter.sources.onnx_file import read_graph


def _weight(model: ModelProto) -> TensorProto:
    return model.graph.initializer[0]


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


def _external(model: ModelProto, **entries: str) -> None:
    graphs.refer(_weight(model), "w.bin", 0, 2048)
    for entry in _weight(model).external_data:
        entry.value = entries.get(entry.key, entry.value)


_LIES: dict[str, tuple[Callable[[ModelProto], object], str]] = {
    "data too short": (
        lambda m: setattr(_weight(m), "raw_data", b"\0" * 8),
        r"'w0' of shape \[16, 32\] needs 2048 bytes",
    ),
    "data too long": (
        lambda m: setattr(_weight(m), "raw_data", bytes(2049)),
        "needs 2048 bytes, and the file has 2049",
    ),
    "no data": (lambda m: _weight(m).ClearField("raw_data"), "needs 512 numbers, and the file has 0"),
    "negative dimension": (lambda m: _weight(m).dims.append(-1), r"'w0' has the shape \[16, 32, -1\]"),
    "product beyond 64 bits": (lambda m: _weight(m).dims.extend([2**62, 2**62]), "has the shape"),
    "zero beside a product beyond 64 bits": (lambda m: _weight(m).dims.extend([0, 2**62, 2**62]), "has the shape"),
    "unknown dtype": (lambda m: setattr(_weight(m), "data_type", 99), "unknown dtype 99"),
    "no dtype": (lambda m: setattr(_weight(m), "data_type", 0), "unknown dtype 0"),
    "segments": (lambda m: setattr(_weight(m).segment, "end", 3), "is in segments"),
    "two of a name": (lambda m: m.graph.initializer.append(_weight(m)), "'w0' is given twice"),
    "a node that gives a weight": (lambda m: m.graph.node[0].output.append("w0"), "'w0' is given twice"),
    "a nameless weight": (lambda m: setattr(_weight(m), "name", ""), "has no name"),
    "an output that nothing gives": (lambda m: setattr(m.graph.output[0], "name", "z"), "nothing gives the output 'z'"),
    "an attribute of another type": (
        lambda m: m.graph.node.append(helper.make_node("Softmax", ["y"], ["z"], name="soft", axis="last")),
        "node 'soft': attribute 'axis' of 'Softmax' is STRING, and has to be INT",
    ),
    "an empty attribute": (
        lambda m: m.graph.node.append(
            NodeProto(
                op_type="Constant", output=["z"], attribute=[AttributeProto(name="value", type=AttributeProto.TENSOR)]
            )
        ),
        "attribute 'value' of 'Constant' is empty",
    ),
    "an attribute twice": (
        lambda m: m.graph.node.append(
            NodeProto(op_type="Softmax", name="s", attribute=[AttributeProto(name="axis", type=AttributeProto.INT)] * 2)
        ),
        "node 's' has two attributes of one name",
    ),
    "external data nowhere": (lambda m: _external(m, location=""), "not said in which"),
    "external offset": (lambda m: _external(m, offset="-4"), "has the offset '-4'"),
    "external length of words": (lambda m: _external(m, length="²"), "has the length '²'"),
    "external length": (lambda m: _external(m, length="2044"), "needs 2048 bytes, and its entry says 2044"),
}


@pytest.mark.parametrize("lie", _LIES)
def test_a_file_that_lies_is_refused_by_name(tmp_path: Path, lie: str) -> None:
    make, said = _LIES[lie]
    model = graphs.mlp()
    make(model)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    (tmp_path / "w.bin").write_bytes(bytes(2048))
    with pytest.raises(SourceError, match=said) as raised:
        read_graph(tmp_path / "m.onnx")
    assert str(raised.value).startswith(f"{tmp_path}/m.onnx: ")


@pytest.mark.parametrize("name", [b"matmul0", b"w0", b"m0"])
def test_names_that_are_not_utf_8_are_refused(tmp_path: Path, name: bytes) -> None:
    content = graphs.mlp().SerializeToString()
    (tmp_path / "m.onnx").write_bytes(content.replace(name, b"\xff" * len(name)))
    with pytest.raises(SourceError, match="not UTF-8"):
        read_graph(tmp_path / "m.onnx")


def test_a_bodys_output_may_come_from_around_it_and_not_from_nowhere(tmp_path: Path) -> None:
    model = graphs.if_branches()
    body = model.graph.node[0].attribute[0].g
    body.output[0].name = "nowhere"
    with pytest.raises(SourceError, match="nothing gives the output 'nowhere'"):
        onnx_soundness.check(tmp_path / "m.onnx", model)


@pytest.mark.parametrize(
    "build", [graphs.mlp, graphs.conv_bn, graphs.if_branches, graphs.loop, graphs.constant_nodes, graphs.embedding]
)
def test_honest_files_pass(tmp_path: Path, build: Callable[[], ModelProto]) -> None:
    onnx_soundness.check(tmp_path / "m.onnx", build())


def test_numbers_in_typed_fields_are_counted_as_their_dtype_packs_them(tmp_path: Path) -> None:
    several: dict[str, Any] = {
        "FLOAT16": [1.0, 2.0, 3.0],
        "INT4": [1, 2, 3],
        "COMPLEX64": [1j, 2j, 3j],
        "STRING": [b"a", b"b", b"c"],
    }
    for dtype, numbers in several.items():
        model = graphs.mlp()
        model.graph.initializer.append(helper.make_tensor("t", getattr(TensorProto, dtype), [3], numbers))
        onnx_soundness.check(tmp_path / "m.onnx", model)
        model.graph.initializer[-1].dims[0] = 7
        with pytest.raises(SourceError, match=r"tensor 't' of shape \[7\] needs"):
            onnx_soundness.check(tmp_path / "m.onnx", model)


@pytest.mark.parametrize(("turns", "said"), [(None, "never ends"), (2**40, "turns 1099511627776 times")])
def test_a_loop_that_nobody_lives_to_see_the_end_of_is_refused(tmp_path: Path, turns: int | None, said: str) -> None:
    with pytest.raises(ConversionError, match=f"Loop 'loop' {said}"):
        onnx_soundness.check(tmp_path / "m.onnx", _loop(turns))


@pytest.mark.parametrize(("turns", "hand_on"), [(1000, True), (None, False), (2**40, False)])
def test_a_loop_that_ends_is_none_of_them(tmp_path: Path, turns: int | None, hand_on: bool) -> None:
    onnx_soundness.check(tmp_path / "m.onnx", _loop(turns, hand_on))


def test_weights_of_functions_are_read_from_beside_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not from the directory that the program happens to run in."""
    tensor = graphs.initializer("c", graphs.values(4))
    graphs.refer(tensor, "w.bin", 0, 16)
    opsets = [helper.make_opsetid("", graphs.OPSET)]
    nodes = [helper.make_node("Constant", [], ["c"], value=tensor), helper.make_node("Add", ["a", "c"], ["b"])]
    function = helper.make_function("own", "F", ["a"], ["b"], nodes, opsets)
    graph = helper.make_graph(
        [helper.make_node("F", ["x"], ["y"], domain="own")], "g", [graphs.edge("x", [4])], [graphs.edge("y", [4])]
    )
    imports = [*opsets, helper.make_opsetid("own", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=graphs.IR_VERSION, functions=[function])
    source, elsewhere = tmp_path / "source", tmp_path / "elsewhere"
    for directory, content in ((source, graphs.values(4).tobytes()), (elsewhere, bytes(16))):
        directory.mkdir()
        (directory / "w.bin").write_bytes(content)
    (source / "m.onnx").write_bytes(model.SerializeToString())
    monkeypatch.chdir(elsewhere)
    read, _ = read_graph(source / "m.onnx")
    (found,) = (node for f in read.functions.values() for node in f if node.op_type == "Constant")
    assert found.attributes["value"].as_tensor().numpy().tobytes() == graphs.values(4).tobytes()


def test_a_range_that_shape_inference_would_count_through_for_hours_is_refused(tmp_path: Path) -> None:
    numbers = [helper.make_tensor(name, TensorProto.INT64, [], [v]) for name, v in (("a", 0), ("b", 2**40), ("c", 1))]
    node = helper.make_node("Range", ["a", "b", "c"], ["y"], name="r")
    model = graphs.model([node], [], [graphs.edge("y", ["n"], TensorProto.INT64)], numbers)
    with pytest.raises(ConversionError, match="Range 'r' counts to 1099511627776"):
        onnx_soundness.check(tmp_path / "m.onnx", model)


@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
def test_constants_that_are_no_numbers_are_nobodys_end(tmp_path: Path, number: float) -> None:
    """Masks are made of them: Where(mask, x, −inf)."""
    odd = graphs.initializer("odd", np.array(number, np.float32))
    nodes = [
        helper.make_node("Max", ["x", "odd"], ["y"], name="m"),
        helper.make_node("Range", ["odd", "odd", "odd"], ["z"], name="r"),
    ]
    proto = graphs.model(nodes, [graphs.edge("x", [4])], [graphs.edge("y", [4]), graphs.edge("z", ["n"])], [odd])
    onnx_soundness.check(tmp_path / "m.onnx", proto)


@pytest.mark.parametrize(("op", "inputs"), [("Expand", ["x", "shape"]), ("ConstantOfShape", ["shape"])])
def test_a_value_that_no_memory_holds_is_refused(tmp_path: Path, op: str, inputs: list[str]) -> None:
    shape = helper.make_tensor("shape", TensorProto.INT64, [2], [2**20, 2**20])
    node = helper.make_node(op, inputs, ["y"], name="n")
    model = graphs.model([node], [graphs.edge("x", [1])], [graphs.edge("y")], [shape])
    with pytest.raises(ConversionError, match=rf"{op} 'n' makes a tensor of shape \[1048576, 1048576\]"):
        onnx_soundness.check(tmp_path / "m.onnx", model)
