from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from lowered import Lowered, assert_same_tensors, lower, relative_l2
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper

import graphs
from bf16kit.converter.fuse.fuse import PUT_TOGETHER
from bf16kit.converter.rewrite import prepare
from bf16kit.converter.rewrite.explicit import floating_tensors

_X16 = graphs.values(4, 16, seed=9)
_CASES: dict[str, tuple[Callable[[], ModelProto], dict[str, NDArray[Any]]]] = {
    "mlp": (graphs.mlp, {"x": _X16}),
    "embedding": (graphs.embedding, {"ids": np.array([[1, 2, 3]])}),
    "conv": (lambda: graphs.conv_bn(16), {"x": graphs.values(2, 3, 8, 8, seed=4)}),
    "constant": (graphs.constant_nodes, {"x": _X16}),
    "then": (graphs.if_branches, {"x": _X16, "flag": np.array(True)}),
    "else": (graphs.if_branches, {"x": _X16, "flag": np.array(False)}),
    "loop": (graphs.loop, {"x": _X16, "steps": np.array(3)}),
}


def _lower(case: str, tmp_path: Path) -> Lowered:
    return lower(tmp_path / "m" / "1", _CASES[case][0]())


@pytest.mark.parametrize("case", _CASES)
def test_every_graph_gives_the_outputs_of_the_source_under_its_names_and_holds_no_weights(
    case: str, tmp_path: Path
) -> None:
    made, feeds, source = _lower(case, tmp_path), _CASES[case][1], _CASES[case][0]().graph
    assert_same_tensors(made.artifact, made.checkpoint)
    expected = made.run_source(feeds)["y"]
    np.testing.assert_array_equal(made.run_reference(feeds)["y"], expected)
    assert 0 < relative_l2(expected, made.run_cpu(feeds)["y"]) < 4e-3
    assert 0 < relative_l2(expected, made.run_emulated(feeds)["y"]) < 8e-3
    for name in ("cpu", "cuda", "reference"):
        graph = made.graph(name)
        assert [(v.name, v.type.tensor_type.elem_type) for v in (*graph.input, *graph.output)] == [
            (v.name, v.type.tensor_type.elem_type) for v in (*source.input, *source.output)
        ]
        for tensor in graph.initializer if name != "reference" else ():
            assert len(tensor.raw_data) <= 1024
            location = {entry.key: entry.value for entry in tensor.external_data}.get("location")
            assert location in (None, "weights.bf16", "weights.fp32")


def test_an_embedding_table_is_looked_up_in_bf16_and_only_its_rows_are_widened(tmp_path: Path) -> None:
    """Size reads what is widened, because ONNX Runtime has no Size of bf16."""
    proto = graphs.embedding()
    proto.graph.node.append(helper.make_node("Size", ["y"], ["size"]))
    proto.graph.output.append(graphs.edge("size", [], TensorProto.INT64))
    made = lower(tmp_path / "m" / "1", proto)
    for name in ("cpu", "cuda"):
        assert made.ops(name) == ["Gather", "Cast", "Size"]
        assert made.graph(name).initializer[0].data_type == TensorProto.BFLOAT16


def test_casts_are_inserted_only_where_bf16_and_fp32_meet(tmp_path: Path) -> None:
    made = _lower("mlp", tmp_path)
    graph = made.graph("cuda")
    computing = [n.op_type for n in graph.node if n.op_type not in {"Cast", *PUT_TOGETHER}]
    assert computing == ["MatMul", "Add", "Relu", "MatMul", "Add"]
    casts = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Cast"}
    # the input, the output, and the one bias too large to be rounded inside the graph
    assert sorted(casts.values()) == ["b0", "x", "y/bf16"]
    assert not casts.keys() & set(casts.values())


def test_shape_reads_bf16_and_isnan_reads_an_fp32_cast(tmp_path: Path) -> None:
    proto = graphs.parsed(
        """(float[batch, 16] x) => (float[batch, 16] y) {
            m = MatMul (x, w) p = Softmax (m) bad = IsNaN (p)
            q = Where (bad, zero, p) size = Shape (q) y = Reshape (q, size)
        }""",
        w=graphs.values(16, 16),
        zero=np.array(0, np.float32),
    )
    made = lower(tmp_path / "m" / "1", proto)
    casts = [node.input[0] for node in made.graph("cuda").node if node.op_type == "Cast"]
    assert sorted(casts) == ["p", "x", "y/bf16"]
    assert relative_l2(made.run_source({"x": _X16})["y"], made.run_emulated({"x": _X16})["y"]) < 8e-3


def test_a_sequence_between_nodes_keeps_its_type(tmp_path: Path) -> None:
    """Older exporters write ``torch.split`` with sequences, and an If may return one."""

    proto = graphs.parsed(
        """(float[batch, 16] x, bool flag) => (float[batch, 48] y) {
            h = MatMul (x, w)
            pair = If (flag) <
                then_branch = one () => (seq(float[]) a) { a = SequenceConstruct (h, x) },
                else_branch = two () => (seq(float[]) b) { b = SequenceConstruct (h, x) }
            >
            three = SequenceInsert (pair, h) y = ConcatFromSequence <axis = 1> (three)
        }""",
        w=graphs.values(16, 16),
    )
    made, feeds = lower(tmp_path / "m" / "1", proto), {"x": _X16, "flag": np.array(True)}
    source = made.run_source(feeds)["y"]
    np.testing.assert_array_equal(made.run_reference(feeds)["y"], source)
    assert relative_l2(source, made.run_cpu(feeds)["y"]) < 4e-3
    assert relative_l2(source, made.run_emulated(feeds)["y"]) < 8e-3


def test_a_sequence_that_a_loop_carries_keeps_its_type(tmp_path: Path) -> None:
    """torch writes an EmbeddingBag so, and leaves the values of the body without types."""
    proto = graphs.parsed(
        """(float[batch, 16] x) => (float[batch, 48] y) {
            h = MatMul (x, w) none = SequenceEmpty ()
            three = Loop (count, , none) <
                body = one (int64 i, bool go, seq(float[]) had) => (bool on, seq(float[]) has)
                { on = Identity (go) has = SequenceInsert (had, h) }
            >
            y = ConcatFromSequence <axis = 1> (three)
        }""",
        w=graphs.values(16, 16),
        count=np.array(3),
    )
    (loop,) = (node for node in proto.graph.node if node.op_type == "Loop")
    for value in (loop.attribute[0].g.input[2], loop.attribute[0].g.output[1]):
        value.ClearField("type")
    made = lower(tmp_path / "m" / "1", proto)
    source = made.run_source({"x": _X16})["y"]
    np.testing.assert_array_equal(made.run_reference({"x": _X16})["y"], source)
    assert relative_l2(source, made.run_cpu({"x": _X16})["y"]) < 4e-3
    assert relative_l2(source, made.run_emulated({"x": _X16})["y"]) < 8e-3


def test_bf16_values_and_outputs_of_the_source_are_kept(tmp_path: Path) -> None:
    """A source may round values itself and return them as bf16; such casts and outputs stay as they are."""
    proto = graphs.mlp((16, 32))
    proto.graph.node.append(helper.make_node("Cast", ["y"], ["narrow"], to=TensorProto.BFLOAT16))
    proto.graph.node.append(helper.make_node("Cast", ["narrow"], ["again"], to=TensorProto.FLOAT))
    proto.graph.output.append(graphs.edge("narrow", ["batch", 32], TensorProto.BFLOAT16))
    proto.graph.output.append(graphs.edge("again", ["batch", 32]))
    made = lower(tmp_path / "m" / "1", proto)
    source = made.run_source({"x": _X16})
    for answer in (made.run_cpu({"x": _X16}), made.run_emulated({"x": _X16})):
        for name, array in source.items():
            assert answer[name].dtype == array.dtype, name
            assert relative_l2(array, answer[name]) < 8e-3


def test_weights_in_an_onnx_file_s_own_external_data_stay_mapped_until_they_are_written(tmp_path: Path) -> None:
    """No preparation step reads a weight into memory, so a checkpoint larger than memory can be converted."""
    path = graphs.save_external(graphs.mlp((32, 32)), tmp_path / "source.onnx", {TensorProto.FLOAT: "source.data"})
    model = ir.load(path)
    tensors = floating_tensors(model)
    prepared = prepare(model, tensors)
    np.testing.assert_array_equal(tensors["w0"], graphs.values(32, 32))
    for graph in (prepared.reference, prepared.base, prepared.cuda):
        assert isinstance(graph.graph.initializers["w0"].const_value, ir.ExternalTensor)
