"""A graph made explicit: functions inlined, weights in the main graph and stored once, nodes that copy removed."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from lowered import assert_same_tensors, lower
from onnx import GraphProto, ModelProto, helper

import graphs
from bf16kit.converter.graph.types import infer_types, run
from bf16kit.converter.rewrite.explicit import (
    constants_to_initializers,
    floating_tensors,
    hoist_initializers,
    inline_functions,
    name_everything,
    remove_identities,
    share_equal_weights,
)
from bf16kit.messages.errors import ConversionError


def test_functions_are_inlined_and_the_exporter_s_stack_traces_are_dropped() -> None:
    proto = graphs.mlp((16, 16))
    proto.graph.node[0].metadata_props.add(key="pkg.torch.onnx.stack_trace", value="/home/somebody/model.py")
    opset = [helper.make_opsetid("", 22)]
    proto.functions.append(helper.make_function("local", "Double", ["a"], ["b"], graphs.nodes("b = Add (a, a)"), opset))
    proto.opset_import.append(helper.make_opsetid("local", 1))
    proto.graph.node.append(helper.make_node("Double", ["y"], ["z"], domain="local"))
    proto.graph.output[0].name = "z"
    model = run([inline_functions], ir.from_proto(proto))
    assert [node.op_type for node in model.graph] == ["MatMul", "Add", "Add"]
    assert b"somebody" not in ir.to_proto(model).SerializeToString()


def test_constants_written_as_attributes_become_tensors_of_onnx_s_dtypes() -> None:
    proto = graphs.parsed(
        """(float[batch, 4] x) => (float[batch, 1] y) {
            one = Constant <value_float = 1.0> () axes = Constant <value_ints = [1]> ()
            s = ReduceSum (x, axes) y = Add (s, one)
        }"""
    )
    model = run([constants_to_initializers], ir.from_proto(proto))
    dtypes = {name: value.dtype for name, value in model.graph.initializers.items()}
    assert dtypes == {"one": ir.DataType.FLOAT, "axes": ir.DataType.INT64}


def test_a_constant_that_is_an_output_keeps_its_name_through_an_identity() -> None:
    proto = graphs.parsed("(float[1] x) => (float[1] y) { y = Constant <value = float[1] {0}> () }")
    model = run([constants_to_initializers, hoist_initializers], ir.from_proto(proto))
    assert [node.op_type for node in model.graph] == ["Identity"]
    assert [value.name for value in model.graph.outputs] == ["y"]
    assert list(model.graph.initializers) == ["y.value"]


def test_the_tensors_of_an_onnx_file_are_found_wherever_they_are() -> None:
    inside_if = floating_tensors(ir.from_proto(graphs.if_branches()))
    inside_loop = floating_tensors(ir.from_proto(graphs.loop()))
    assert sorted(inside_if) == ["captured", "inner"]
    assert sorted(inside_loop) == ["captured", "own"]
    np.testing.assert_array_equal(inside_if["inner"], graphs.values(16, 16, seed=1))


def test_a_weight_inside_a_function_is_a_tensor_of_the_file_and_restored(tmp_path: Path) -> None:
    """The function's constants are in the file, except a value that its caller passes as an attribute."""
    proto = graphs.mlp((16, 32))
    weight = graphs.initializer("v", graphs.values(32, 32, seed=4))
    nodes = graphs.nodes("v = Identity () factor = Constant () m = MatMul (a, v) b = Mul (m, factor)")
    nodes[0].CopyFrom(helper.make_node("Constant", [], ["v"], value=weight))
    told = onnx.AttributeProto(name="value_float", ref_attr_name="by", type=onnx.AttributeProto.FLOAT)
    nodes[1].attribute.append(told)
    opset = helper.make_opsetid("", graphs.OPSET)
    proto.functions.append(helper.make_function("local", "Scaled", ["a"], ["b"], nodes, [opset], ["by"]))
    proto.opset_import.append(helper.make_opsetid("local", 1))
    proto.graph.node.append(helper.make_node("Scaled", ["y"], ["z"], domain="local", by=2.0))
    proto.graph.output[0].name = "z"
    made = lower(tmp_path / "m" / "1", proto)
    assert sorted(made.checkpoint) == ["b0", "v", "w0"]
    assert_same_tensors(made.artifact, made.checkpoint)
    feeds = {"x": graphs.values(2, 16)}
    np.testing.assert_array_equal(made.run_reference(feeds)["z"], made.run_source(feeds)["z"])


def test_shapes_and_constants_without_an_output_are_not_tensors_of_the_file() -> None:
    proto = graphs.mlp()
    proto.graph.initializer.append(graphs.initializer("shape", np.array([-1, 2, 2])))
    proto.graph.node.append(helper.make_node("Constant", [], [], value_floats=[1.0] * 300))
    assert sorted(floating_tensors(ir.from_proto(proto))) == ["b0", "b1", "w0", "w1"]


_STEPS = (name_everything, constants_to_initializers, hoist_initializers)


def test_unnamed_outputs_before_a_used_one_are_named_and_the_graph_keeps_its_inputs() -> None:
    """onnx_ir cannot write an output without a name, and shape inference then left all weights among the inputs."""
    model = ir.from_proto(
        graphs.parsed(
            """(float[batch, 16] x, int64 steps) => (float[3, batch, 16] y) {
                last, y = Loop <body = body (int64 i, bool go, float[batch, 16] h)
                                    => (bool go_next, float[batch, 16] h_next, float[batch, 16] each) {
                    m = MatMul (h, captured) h_next = Tanh (m) each = Identity (m) go_next = Identity (go)
                }> (steps, , x)
            }""",
            captured=graphs.values(16, 16),
        )
    )
    for node in model.graph.all_nodes():
        for output in node.outputs:
            output.name = output.name if output.is_graph_output() else None
    run([*_STEPS, infer_types], model)
    assert [value.name for value in model.graph.inputs] == ["x", "steps"]
    assert list(model.graph.initializers) == ["captured"]
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


def _choice(branch: Callable[[str, int], GraphProto], shape: list[int | str]) -> ModelProto:
    choice = helper.make_node("If", ["flag"], ["y"], then_branch=branch("a", 1), else_branch=branch("b", 2))
    inputs = [graphs.edge("x", ["batch", 16]), graphs.edge("flag", [], onnx.TensorProto.BOOL)]
    return graphs.model([choice], inputs, [graphs.edge("y", shape)])


def test_weights_of_both_branches_move_to_the_main_graph_under_different_names() -> None:
    def branch(name: str, seed: int) -> GraphProto:
        node = helper.make_node("MatMul", ["x", "weight"], [name])
        weight = graphs.initializer("weight", graphs.values(16, 16, seed=seed))
        return helper.make_graph([node], name, [], [graphs.edge(name, ["batch", 16])], [weight])

    model = run(_STEPS, ir.from_proto(_choice(branch, ["batch", 16])))
    stored = {name: value.const_value for name, value in model.graph.initializers.items()}
    assert len(stored) == 2
    for body, seed in zip(model.graph.subgraphs(), (2, 1), strict=True):  # attributes come in alphabetical order
        read = next(iter(body)).inputs[1]
        assert read is not None
        tensor = stored[read.name or ""]
        assert tensor is not None
        np.testing.assert_array_equal(tensor.numpy(), graphs.values(16, 16, seed=seed))
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


def test_a_weight_with_the_name_of_a_value_in_another_body_is_renamed() -> None:
    proto = graphs.if_branches()
    then = next(a.g for a in proto.graph.node[0].attribute if a.name == "then_branch")
    then.node[0].output[0] = then.output[0].name = "inner"  # the name of the other branch's weight
    onnx.checker.check_model(proto, full_check=True)
    model = run(_STEPS, ir.from_proto(proto))
    assert sorted(model.graph.initializers) == ["captured", "inner_1"]
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


def test_a_branch_that_only_returns_a_constant_still_returns_it() -> None:
    def branch(name: str, value: int) -> GraphProto:
        constant = graphs.initializer(name, np.full((32,), value, np.float32))
        return helper.make_graph([], f"{name}_graph", [], [graphs.edge(name, [32])], [constant])

    model = run(_STEPS, ir.from_proto(_choice(branch, [32])))
    assert {name.split(".")[0] for name in model.graph.initializers} == {"a", "b"}
    assert [[n.op_type for n in body] for body in model.graph.subgraphs()] == [["Identity"], ["Identity"]]
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


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


@pytest.mark.parametrize(
    ("text", "outputs", "ops"),
    [
        (
            """(float[batch, 4] x) => (float[batch, 4] y) {
                a = Identity (x) b = Dropout (a) c = Cast <to = 1> (b) d = Relu (c) y = Identity (d)
            }""",
            ["y"],
            ["Relu"],
        ),
        (  # two outputs copy one value, and one copies an input through two nodes: one Identity each must stay
            """(float[4] x) => (float[4] y, float[4] z, float[4] same) {
                r = Relu (x) y = Identity (r) z = Identity (r) a = Identity (x) same = Identity (a)
            }""",
            ["y", "z", "same"],
            ["Relu", "Identity", "Identity"],
        ),
    ],
)
def test_nodes_that_copy_are_removed_unless_an_edge_would_lose_its_name(
    text: str, outputs: list[str], ops: list[str]
) -> None:
    model = run([infer_types, remove_identities], ir.from_proto(graphs.parsed(text)))
    assert [value.name for value in (*model.graph.inputs, *model.graph.outputs)] == ["x", *outputs]
    assert [node.op_type for node in model.graph] == ops


def test_an_output_keeps_a_shape_that_inference_cannot_find() -> None:
    """Shapes of most other domains' outputs are not inferred, and every scikit-learn model ends in an Identity."""
    nodes = [helper.make_node("Spell", ["x"], ["s"], domain="com.example"), helper.make_node("Identity", ["s"], ["y"])]
    proto = graphs.model(nodes, [graphs.edge("x", ["batch", 4])], [graphs.edge("y", ["batch", 4])])
    proto.opset_import.append(helper.make_opsetid("com.example", 1))
    model = run([infer_types, remove_identities], ir.from_proto(proto))
    assert [node.op_type for node in model.graph] == ["Spell"]
    assert model.graph.outputs[0].shape == ir.Shape(["batch", 4])


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
    model = run([share_equal_weights], ir.from_proto(proto))
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
    assert list(run([share_equal_weights], ir.from_proto(proto)).graph.initializers) == ["in_a"]


def test_weights_that_differ_in_one_bit_are_not_shared() -> None:
    twin = graphs.values(64, 16).T.copy()
    twin[0, 0] = np.nextafter(twin[0, 0], np.float32(9))
    model = run([share_equal_weights], ir.from_proto(_tied(twin)))
    assert sorted(model.graph.initializers) == ["head", "table"]


def test_nodes_without_a_name_or_with_a_duplicate_get_the_same_name_every_time() -> None:
    def names() -> list[str | None]:
        proto = graphs.mlp()
        for node in proto.graph.node:
            node.name = "same" if node.op_type == "MatMul" else ""
        return [node.name for node in run([name_everything], ir.from_proto(proto)).graph]

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
        run([name_everything], ir.from_proto(proto))
