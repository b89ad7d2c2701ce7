"""Names of dimensions inside an ONNX file are guesses: used to find fusions, and never shown to ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from numpy.typing import NDArray
from onnx import ModelProto, helper

import graphs
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime.loading import load
from converter.convert import Result, convert
from converter.options import Options, parse_target
from converter.read import onnx_file
from converter.write.graphs import serialize

WIDTH, HEADS, DEPTH = 32, 2, 16
_GRAPHS = ("cpu", "cuda", "reference")


def _bert(batch: str = "batch", seq: str = "seq") -> ModelProto:
    """Return an encoder layer as torch's exporter writes it: positions end where a Shape says, and are expanded.

    ONNX's inference knows neither size, so ``value_info`` alone tells that the sum has the input's dimensions.
    """
    weights = {name: graphs.values(WIDTH, WIDTH, seed=i) for i, name in enumerate(["wq", "wk", "wv", "wo"])}
    constants: dict[str, NDArray[Any]] = {
        "table": graphs.values(64, WIDTH, seed=8),
        "every": np.arange(64)[None],
        "zero": np.array([0]),
        "one": np.array([1]),
        "heads": np.array([HEADS]),
        "depth": np.array([DEPTH]),
        "width": np.array([WIDTH]),
        "scale": np.array(0.25, np.float32),
        "g": graphs.values(WIDTH, seed=9),
        "b": graphs.values(WIDTH, seed=10),
    }
    nodes = [
        helper.make_node("Shape", ["x"], ["batch_size"], start=0, end=1),
        helper.make_node("Shape", ["x"], ["seq_size"], start=1, end=2),
        helper.make_node("Slice", ["every", "zero", "seq_size", "one", "one"], ["positions"]),
        helper.make_node("Concat", ["batch_size", "seq_size"], ["both"], axis=0),
        helper.make_node("Expand", ["positions", "both"], ["ids"]),
        helper.make_node("Gather", ["table", "ids"], ["embedded"]),
        helper.make_node("Add", ["x", "embedded"], ["h"]),
        helper.make_node("Concat", ["batch_size", "seq_size", "heads", "depth"], ["split"], axis=0),
        helper.make_node("Concat", ["batch_size", "seq_size", "width"], ["merge"], axis=0),
    ]
    for name, order in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
        nodes += [
            helper.make_node("MatMul", ["h", f"w{name}"], [f"{name}_rows"]),
            helper.make_node("Reshape", [f"{name}_rows", "split"], [f"{name}_heads"]),
            helper.make_node("Transpose", [f"{name}_heads"], [name], perm=order),
        ]
    nodes += [
        helper.make_node("MatMul", ["q", "k"], ["products"]),
        helper.make_node("Mul", ["products", "scale"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["weights"], axis=-1),
        helper.make_node("MatMul", ["weights", "v"], ["mixed"]),
        helper.make_node("Transpose", ["mixed"], ["turned"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["turned", "merge"], ["merged"]),
        helper.make_node("MatMul", ["merged", "wo"], ["projected"]),
        helper.make_node("Add", ["projected", "h"], ["sum"]),
        helper.make_node("LayerNormalization", ["sum", "g", "b"], ["y"], axis=-1),
    ]
    rows: list[int | str] = [batch, seq, WIDTH]
    proto = graphs.model(
        nodes,
        [graphs.edge("x", ["batch", "seq", WIDTH])],
        [graphs.edge("y", ["batch", "seq", WIDTH])],
        [graphs.initializer(name, array) for name, array in {**weights, **constants}.items()],
    )
    proto.graph.value_info.extend(
        [
            graphs.edge(name, rows)
            for name in ("embedded", "h", "q_rows", "k_rows", "v_rows", "merged", "projected", "sum")
        ]
    )
    proto.graph.value_info.extend(
        [graphs.edge(name, [batch, HEADS, seq, DEPTH]) for name in ("q", "v", "mixed")]
        + [graphs.edge(name, [batch, HEADS, seq, seq]) for name in ("products", "scores", "weights")]
    )
    return proto


def _converted(tmp_path: Path, proto: ModelProto) -> Result:
    onnx.save(proto, tmp_path / "bert.onnx")
    target = parse_target(tmp_path / "r" / "m" / "1")
    return convert(Options(source=tmp_path / "bert.onnx", target=target, formats=("onnx",), report=False))


def test_an_onnx_file_gets_the_fusions_of_the_same_model_from_torch(tmp_path: Path) -> None:
    """The names that show them are then withheld from ONNX Runtime."""
    made = _converted(tmp_path, _bert())
    assert not [note for note in made.notes if "CPU kernel does not compute" in note]
    files = {name: onnx.load(made.artifact.file(f"{name}.onnx"), load_external_data=False) for name in _GRAPHS}
    kernel = [node.op_type for node in files["cpu"].graph.node if node.domain == "bf16kit"]
    assert [op for op in kernel if not op.startswith("MatMul")] == ["Attention_rrr", "AddLayerNorm_bias"]
    for proto in files.values():
        inner = [dim.dim_param for value in proto.graph.value_info for dim in value.type.tensor_type.shape.dim]
        assert set(inner) == {""}
        assert not proto.metadata_props


def test_wrong_guesses_cost_fusions_and_change_no_result(tmp_path: Path) -> None:
    """Both free dimensions are called ``seq`` inside."""
    artifact = _converted(tmp_path, _bert(batch="seq")).artifact
    feeds = {"x": graphs.values(3, 5, WIDTH, seed=3)}
    session = onnxruntime.InferenceSession(tmp_path / "bert.onnx", providers=["CPUExecutionProvider"])
    expected = session.run(None, feeds)[0]
    found = load(artifact, "cpu").run(feeds)["y"]
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 1e-2


def test_inner_names_follow_the_inputs_and_others_are_dropped(tmp_path: Path) -> None:
    proto = _bert()
    proto.graph.value_info[0].type.tensor_type.shape.dim[1].dim_param = "somewhere"
    onnx.save(proto, tmp_path / "bert.onnx")
    model, _ = onnx_file.read_graph(tmp_path / "bert.onnx")
    onnx_file.resolve_edges(model, [TensorSpec("x", "float32", ("b", "s", WIDTH))])
    shapes = {value.name: value.shape for node in model.graph for value in node.outputs}
    assert [getattr(dim, "value", dim) for dim in shapes["h"] or ()] == ["b", "s", WIDTH]
    assert [getattr(dim, "value", dim) for dim in shapes["embedded"] or ()] == ["b", None, WIDTH]


def test_only_guesses_are_removed_from_what_is_written() -> None:
    model = ir.from_proto(_bert())
    model.metadata_props["own"] = "kept"
    proto = onnx.ModelProto.FromString(serialize(model))
    assert [entry.key for entry in proto.metadata_props] == ["own"]
    named = {dim.dim_param for value in proto.graph.value_info for dim in value.type.tensor_type.shape.dim}
    assert named == {"batch", "seq", ""}
