"""ONNX files that are damaged, endless, larger than memory or a danger to the library end in one sentence."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from converting import ONNX_ONLY, Cli, process, tree
from onnx import ModelProto, NodeProto, TensorProto, helper

import graphs
from bf16kit.converter.process import onnx_trial


def _weight(model: ModelProto) -> TensorProto:
    return model.graph.initializer[0]


def _external(model: ModelProto, **entries: str) -> None:
    graphs.refer(_weight(model), "w.bin", 0, 2048)
    for entry in _weight(model).external_data:
        entry.value = entries.get(entry.key, entry.value)


def _node(*nodes: NodeProto) -> Callable[[ModelProto], None]:
    return lambda model: model.graph.node.extend(nodes)


_DAMAGE: dict[str, tuple[Callable[[ModelProto], object], int, str]] = {
    "data too short": (
        lambda m: setattr(_weight(m), "raw_data", b"\0" * 8),
        2,
        "damaged: TensorProto (tensor name: w0) raw_data size (8 bytes) is too small",
    ),
    "data too long": (lambda m: setattr(_weight(m), "raw_data", bytes(2049)), 3, " size"),  # as any release words it
    "product beyond 64 bits": (lambda m: _weight(m).dims.extend([2**62, 2**62]), 2, "overflow (tensor name: w0)"),
    "unknown dtype": (lambda m: setattr(_weight(m), "data_type", 99), 2, "not an ONNX model"),
    "external data nowhere": (lambda m: _external(m, location=""), 2, "m.onnx"),
    "external offset": (lambda m: _external(m, offset="-4"), 2, "the data of 'w0' cannot be read"),
    "external length": (lambda m: _external(m, length="2044"), 3, "w0 external data size mismatch"),
    "two of a name": (lambda m: m.graph.initializer.append(_weight(m)), 2, "w0"),
    "an output that nothing gives": (lambda m: setattr(m.graph.output[0], "name", "z"), 2, "'z'"),
    "a declared size": (lambda m: m.graph.input.append(graphs.edge("w0", [16, 33])), 3, "Shape of initializer w0"),
    "an attribute of another type": (
        _node(helper.make_node("Softmax", ["y"], ["z"], name="soft", axis="last")),
        2,
        "Mismatched attribute type in 'soft : axis'",
    ),
    "an input that nothing gives": (_node(helper.make_node("Relu", ["nothing"], ["z"])), 3, "'nothing'"),
    "a function that calls itself": (
        lambda m: m.functions.append(
            helper.make_function(
                "own", "F", ["a"], ["b"], [helper.make_node("F", ["a"], ["b"], domain="own")], m.opset_import
            )
        ),
        2,
        "own::F",
    ),
}


@pytest.mark.parametrize("damage", _DAMAGE)
def test_a_damaged_file_is_rejected_by_name(cli: Cli, tmp_path: Path, target: Path, damage: str) -> None:
    change, code, said = _DAMAGE[damage]
    model = graphs.mlp()
    change(model)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    (tmp_path / "w.bin").write_bytes(bytes(2048))
    cli("checkpoint", tmp_path / "m.onnx", "--out", target).refused(code, f"{tmp_path}/m.onnx", said)
    assert tree(tmp_path) == ["m.onnx", "w.bin"]


@pytest.mark.parametrize("text", ["matmul0", "MatMul", "w0", "tiny", "batch", "w.bin"])
def test_names_that_are_not_utf_8_are_rejected(cli: Cli, tmp_path: Path, target: Path, text: str) -> None:
    model = graphs.mlp()
    graphs.refer(_weight(model), "w.bin", 0, 2048)
    (tmp_path / "w.bin").write_bytes(bytes(2048))
    content = model.SerializeToString()
    assert text.encode() in content
    (tmp_path / "m.onnx").write_bytes(content.replace(text.encode(), b"\xff" * len(text)))
    cli("checkpoint", tmp_path / "m.onnx", "--out", target).refused(2, "m.onnx: damaged: the name b'", "is not UTF-8")


def _loop(turns: int | None) -> ModelProto:
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["go2"]), helper.make_node("Identity", ["h"], ["h2"])],
        "body",
        [graphs.edge("i", [], TensorProto.INT64), graphs.edge("go", [], TensorProto.BOOL), graphs.edge("h", [2])],
        [graphs.edge("go2", [], TensorProto.BOOL), graphs.edge("h2", [2])],
    )
    constants = [helper.make_tensor("true", TensorProto.BOOL, [], [1])]
    if turns is not None:
        constants.append(helper.make_tensor("turns", TensorProto.INT64, [], [turns]))
    node = helper.make_node("Loop", ["" if turns is None else "turns", "true", "x"], ["y"], name="loop", body=body)
    return graphs.model([node], [graphs.edge("x", [2])], [graphs.edge("y", [2])], constants)


@pytest.mark.long
@pytest.mark.parametrize("turns", [None, 2**40])
def test_a_loop_that_does_not_end_is_stopped(
    cli: Cli, tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, turns: int | None
) -> None:
    monkeypatch.setattr(onnx_trial, "SECONDS", 2)
    (tmp_path / "m.onnx").write_bytes(_loop(turns).SerializeToString())
    said = ("m.onnx: ONNX Runtime did not open it and run it once", "within 2 s of processor time")
    cli("checkpoint", tmp_path / "m.onnx", "--out", target).refused(3, *said)
    assert tree(tmp_path) == ["m.onnx"]


_HUGE = {
    "a size beyond 64 bits": (helper.make_node("ConstantOfShape", ["beyond"], ["y"]), ["a", "b"]),
    "ConstantOfShape": (helper.make_node("ConstantOfShape", ["shape"], ["y"]), ["a", "b"]),
    "Expand": (helper.make_node("Expand", ["x", "shape"], ["y"]), ["a", "b"]),
    "Range": (helper.make_node("Range", ["zero", "end", "one"], ["y"]), ["a"]),
}


@pytest.mark.parametrize("operator", _HUGE)
def test_a_graph_that_needs_more_memory_than_there_is_is_stopped(
    cli: Cli, tmp_path: Path, target: Path, operator: str
) -> None:
    node, dims = _HUGE[operator]
    shapes = {"shape": [2**20, 2**20], "beyond": [2**62, 4]}
    constants = [helper.make_tensor(name, TensorProto.INT64, [2], shape) for name, shape in shapes.items()]
    constants += [
        helper.make_tensor(n, TensorProto.FLOAT, [], [v]) for n, v in (("zero", 0), ("end", 2**40), ("one", 1))
    ]
    model = graphs.model([node], [graphs.edge("x", ["n"])], [graphs.edge("y", dims)], constants)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    cli("checkpoint", tmp_path / "m.onnx", "--out", target).refused(3, "m.onnx: takes more than the", "GB of memory")


@pytest.mark.parametrize(
    ("times", "said"),
    [(7, "tensor 'z' has 128 dimensions"), pytest.param(40, "inferring its shapes takes", marks=pytest.mark.long)],
)
def test_sizes_beyond_reason_are_rejected_before_they_take_memory(
    cli: Cli, tmp_path: Path, target: Path, times: int, said: str
) -> None:
    """Nothing reads z, so ONNX Runtime computes none of it, but ONNX's inference does."""
    doubled = " ".join(f"s{i + 1} = Concat <axis = 0> (s{i}, s{i})" for i in range(times))
    text = f"(float[batch, 16] x) => (float[batch, 16] y) {{ {doubled} z = Reshape (x, s{times}) y = MatMul (x, w) }}"
    source = graphs.parsed(text, w=graphs.values(16, 16), s0=np.array([1]))
    (tmp_path / "m.onnx").write_bytes(source.SerializeToString())
    cli("checkpoint", tmp_path / "m.onnx", "--out", target).refused(3, f"m.onnx: {said}")


@pytest.mark.long
def test_large_constants_take_no_memory_while_shapes_are_inferred(tmp_path: Path) -> None:
    """Some exporters write weights as Constants, and also in the branches of an If."""
    weight = helper.make_tensor("t", TensorProto.FLOAT, [1 << 25], bytes(4 << 25), raw=True)
    branches = [graphs.parsed("(float none) => (float y) { y = Identity (none) }").graph for _ in range(2)]
    for place, branch in enumerate(branches):
        del branch.input[:]
        branch.node[0].CopyFrom(helper.make_node("Constant", [], [branch.output[0].name], value=weight))
        branch.output[0].CopyFrom(graphs.edge(f"y{place}", [1 << 25]))
        branch.node[0].output[0] = f"y{place}"
    source = graphs.parsed("(bool c) => (float[n] y) { y = Identity (c) }")
    then, otherwise = branches
    source.graph.node[0].CopyFrom(helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=otherwise))
    (tmp_path / "m.onnx").write_bytes(source.SerializeToString())
    onnx_trial.check(tmp_path / "m.onnx")


@pytest.mark.long
def test_sizes_that_crash_the_library_do_not_keep_a_model_from_being_converted(tmp_path: Path, target: Path) -> None:
    """ONNX Runtime 1.31 divides by the height of what MaxPool gives behind a Conv: for an image of one line by 0."""
    proto = graphs.parsed(
        """(float[batch, 16, height, width] x) => (float[batch, 64] y) {
            conv = Conv <pads = [1, 1, 1, 1]> (x, kernel)
            pooled = MaxPool <kernel_shape = [3, 3], strides = [2, 2]> (conv)
            mean = ReduceMean <keepdims = 0> (pooled, axes) y = MatMul (mean, weight)
        }""",
        kernel=graphs.values(32, 16, 3, 3),
        axes=np.array([2, 3]),
        weight=graphs.values(32, 64),
    )
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    process("checkpoint", tmp_path / "m.onnx", "--out", target, "--profile", "cpu", *ONNX_ONLY).published()


def test_a_graph_that_crashes_the_library_is_reported(
    cli: Cli, tmp_path: Path, target: Path, onnx_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file is known that crashes the installed versions, so the child dies by itself."""
    died = tmp_path / "python"
    died.write_text("#!/bin/sh\nkill -SEGV $$\n")
    died.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(died))
    said = f"{onnx_file}: crashes ONNX Runtime: its process ended with SIGSEGV"
    cli("checkpoint", onnx_file, "--out", target).refused(3, said)
