from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from lowered import lower
from onnx import ModelProto, helper

import graphs
from bf16kit.messages.errors import ConversionError
from converter.graph.types import InferTypes, run
from converter.rewrite.explicit import NameEverything, RemoveIdentities, ShareEqualWeights


def _clip(bounds: list[str]) -> ModelProto:
    given = ", ".join(["m", *bounds])
    return graphs.parsed(
        f"(float[batch, 16] x) => (float[batch, 16] y) {{ m = MatMul (x, w) [clip] y = Clip ({given}) }}",
        w=graphs.values(16, 16),
        low=np.array(-0.5, np.float32),
        high=np.array(0.5, np.float32),
    )


@pytest.mark.parametrize(
    ("bounds", "ops"), [(["low", "high"], ["Max", "Min"]), (["low"], ["Max"]), (["", "high"], ["Min"]), ([], ["Clip"])]
)
def test_clip_becomes_the_max_and_min_it_needs(bounds: list[str], ops: list[str], tmp_path: Path) -> None:
    proto = _clip(bounds)
    proto.graph.node[0].output[0] = proto.graph.node[1].input[0] = "clip/max"  # a name that a new node would take
    made = lower(tmp_path / "m" / "1", proto)
    assert [op for op in made.ops("cuda") if op not in ("Cast", "MatMul")] == ops
    assert "Clip" in made.ops("cpu")
    feeds = {"x": graphs.values(4, 16, seed=2) * 4}
    np.testing.assert_allclose(made.run_emulated(feeds)["y"], made.run_source(feeds)["y"], atol=2e-2)


def test_identities_dropouts_and_casts_to_the_same_dtype_are_removed() -> None:
    proto = graphs.parsed(
        """(float[batch, 4] x) => (float[batch, 4] y) {
            a = Identity (x) b = Dropout (a) c = Cast <to = 1> (b) d = Relu (c) y = Identity (d)
        }"""
    )
    model = run([InferTypes(), RemoveIdentities()], ir.from_proto(proto))
    assert [node.op_type for node in model.graph] == ["Relu"]
    assert [value.name for value in model.graph.outputs] == ["y"]


def test_an_output_keeps_a_shape_that_inference_cannot_find() -> None:
    """Shapes of most other domains' outputs are not inferred, and every scikit-learn model ends in an Identity."""
    nodes = [helper.make_node("Spell", ["x"], ["s"], domain="com.example"), helper.make_node("Identity", ["s"], ["y"])]
    proto = graphs.model(nodes, [graphs.edge("x", ["batch", 4])], [graphs.edge("y", ["batch", 4])])
    proto.opset_import.append(helper.make_opsetid("com.example", 1))
    model = run([InferTypes(), RemoveIdentities()], ir.from_proto(proto))
    assert [node.op_type for node in model.graph] == ["Spell"]
    assert model.graph.outputs[0].shape == ir.Shape(["batch", 4])


def test_edges_keep_their_names_if_only_identities_are_between_them() -> None:
    """Two outputs copy one value, and one output copies an input through two nodes: one Identity each must stay."""
    proto = graphs.parsed(
        """(float[4] x) => (float[4] y, float[4] z, float[4] same) {
            r = Relu (x) y = Identity (r) z = Identity (r) a = Identity (x) same = Identity (a)
        }"""
    )
    model = run([InferTypes(), RemoveIdentities()], ir.from_proto(proto))
    assert [value.name for value in model.graph.inputs] == ["x"]
    assert [value.name for value in model.graph.outputs] == ["y", "z", "same"]
    assert [node.op_type for node in model.graph] == ["Relu", "Identity", "Identity"]


def _tied(second: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> ModelProto:
    text = (
        f"(int64[batch] ids) => (float[batch, {second.shape[1]}] y) {{ h = Gather (table, ids) y = MatMul (h, head) }}"
    )
    return graphs.parsed(text, table=graphs.values(64, 16), head=second)


def test_a_weight_that_is_another_s_transpose_is_stored_once(tmp_path: Path) -> None:
    table = graphs.values(64, 16)
    checkpoint = {"embed.weight": table, "head.weight": table}
    made = lower(tmp_path / "m" / "1", _tied(np.ascontiguousarray(table.T)), checkpoint=checkpoint)
    assert made.size("weights.bf16") == table.nbytes // 2
    assert [entry.tensor for entry in made.stored.checkpoint] == ["embed.weight", "embed.weight"]
    feeds = {"ids": np.array([3, 1, 4])}
    np.testing.assert_array_equal(made.run_reference(feeds)["y"], made.run_source(feeds)["y"])
    np.testing.assert_allclose(made.run_cpu(feeds)["y"], made.run_source(feeds)["y"], atol=2e-2)


def test_a_table_is_stored_instead_of_its_transpose_whichever_comes_first() -> None:
    proto = _tied(graphs.values(64, 16).T.copy())
    proto.graph.initializer.reverse()
    model = run([ShareEqualWeights()], ir.from_proto(proto))
    assert sorted(model.graph.initializers) == ["table"]
    assert [(node.op_type, node.inputs[0].name) for node in model.graph if node.inputs[0] is not None] == [
        ("Transpose", "table"),
        ("Gather", "table"),
        ("MatMul", "h"),
    ]


def test_equal_tables_of_indices_are_stored_once() -> None:
    """Every layer of a Swin has the same one."""
    index = np.arange(1024).reshape(16, 64)
    proto = graphs.parsed(
        """(float[batch, 1024] x) => (float[batch, 16, 64] y) {
            a = Gather <axis = 1> (x, in_a) b = Gather <axis = 1> (x, in_b) y = Add (a, b)
        }""",
        in_a=index,
        in_b=index,
    )
    assert list(run([ShareEqualWeights()], ir.from_proto(proto)).graph.initializers) == ["in_a"]


def test_weights_that_differ_in_one_bit_are_not_shared() -> None:
    twin = graphs.values(64, 16).T.copy()
    twin[0, 0] = np.nextafter(twin[0, 0], np.float32(9))
    model = run([ShareEqualWeights()], ir.from_proto(_tied(twin)))
    assert sorted(model.graph.initializers) == ["head", "table"]


def test_nodes_without_a_name_or_with_a_duplicate_get_the_same_name_every_time() -> None:
    def names() -> list[str | None]:
        proto = graphs.mlp()
        for node in proto.graph.node:
            node.name = "same" if node.op_type == "MatMul" else ""
        return [node.name for node in run([NameEverything()], ir.from_proto(proto)).graph]

    assert names() == names() == ["same", "Add_1", "Relu_2", "same_1", "Add_4"]


def test_a_value_that_nothing_produces_is_named_with_the_remedy() -> None:
    """onnx_ir drops sparse initializers silently."""
    proto = graphs.mlp((16, 16))
    weight = proto.graph.initializer[0]
    indices = graphs.initializer("indices", np.arange(16 * 16))
    weight.dims[:] = [16 * 16]
    proto.graph.sparse_initializer.append(helper.make_sparse_tensor(weight, indices, [16, 16]))
    del proto.graph.initializer[0]
    with pytest.raises(
        ConversionError, match=r"'matmul0' reads 'w0', which no node, input or initializer gives.*sparse"
    ):
        run([NameEverything()], ir.from_proto(proto))
