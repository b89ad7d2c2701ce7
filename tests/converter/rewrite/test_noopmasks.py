"""Masks that hide nothing become simpler, and only those."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from masking import HEADS, Drawing, feeds, hidden, looked_up, model
from onnx import ModelProto, TensorProto, helper

import graphs
from bf16kit.runtime.ort.session import open_session
from converter.graph.types import InferTypes
from converter.rewrite import run
from converter.rewrite.noopmasks import DropConstantConditions, GatherAllToUnsqueeze
from converter.rewrite.removal import DropUnused

SIZES = [{"batch": b, "seq": s, "keys": s + 2} for b in (1, 2, 3) for s in (1, 2, 3, 5)]


def dropped(proto: ModelProto) -> ir.Model:
    return run([InferTypes(), DropConstantConditions(), DropUnused()], ir.from_proto(proto))


def ands(proto: ModelProto) -> list[str]:
    """Return the names of the And nodes that are left, after checking that the outputs are the same bit for bit."""
    model = dropped(proto)
    before, after = (open_session(each.SerializeToString()) for each in (proto, ir.to_proto(model)))
    for sizes in SIZES:
        fed = feeds(proto, sizes)
        expected, found = before.run(None, fed)[0], after.run(None, fed)[0]
        assert np.shape(found) == np.shape(expected)
        assert np.asarray(found).tobytes() == np.asarray(expected).tobytes()
    return [node.name or "" for node in model.graph if node.op_type == "And"]


@pytest.mark.parametrize(
    "proto",
    [
        hidden(),
        hidden("const"),
        hidden(op="LessOrEqual"),
        hidden(start=3, bound=3),
        hidden(bound=-1, step=2),
    ],
    ids=["a range", "a constant", "the other way round", "from three on", "every second"],
)
def test_a_condition_that_always_holds_is_dropped_and_the_mask_stays_small(proto: ModelProto) -> None:
    assert ands(proto) == []
    (where,) = [node for node in dropped(proto).graph if node.op_type == "Where"]
    assert [str(dim) for dim in where.outputs[0].shape or ()] == ["batch", "1", "1", "seq"]


@pytest.mark.parametrize(
    "proto",
    [
        hidden("fed"),
        hidden(bound=1),
        hidden(start=-1),
        hidden(start=2, step=-1, bound=0),
        hidden(op="Greater"),
        hidden(op="Less", bound=0),
    ],
    ids=["fed", "but for the first", "from below", "downwards", "greater", "less"],
)
def test_a_condition_that_may_be_false_stays(proto: ModelProto) -> None:
    assert ands(proto) == ["shown"]


def edited(name: str, op: str) -> ModelProto:
    proto = hidden()
    (node,) = [each for each in proto.graph.node if each.name == name]
    node.op_type = op
    return proto


def test_a_constant_that_is_not_true_everywhere_stays() -> None:
    proto = hidden("const")
    (yes,) = [tensor for tensor in proto.graph.initializer if tensor.name == "yes"]
    yes.CopyFrom(graphs.initializer("yes", np.array([True, False, True])))
    (holds,) = [tensor for tensor in proto.graph.initializer if tensor.name == "holds"]
    holds.CopyFrom(graphs.initializer("holds", np.array([[[[True], [False]]]])))
    names = [node.name for node in dropped(proto).graph if node.op_type == "And"]
    assert names == ["both", "shown"]


def test_an_or_stays() -> None:
    assert ands(edited("shown", "Or")) == []  # the other And, which widens nothing, is dropped
    assert [n.op_type for n in dropped(edited("shown", "Or")).graph if n.name == "shown"] == ["Or"]


def test_a_mask_that_must_have_its_shape_keeps_it() -> None:
    """The widened mask or a value computed from it is a graph output, or a node reads it that does not broadcast."""
    for name in ("shown", "number"):
        proto = hidden()
        kind = TensorProto.BOOL if name == "shown" else TensorProto.FLOAT
        proto.graph.output.append(graphs.edge(name, dtype=kind))
        assert ands(proto) == ["shown"]
    proto = hidden()
    proto.graph.node.append(helper.make_node("Shape", ["number"], ["sizes"], name="sizes"))
    proto.graph.output.append(graphs.edge("sizes", dtype=TensorProto.INT64))
    assert ands(proto) == ["shown"]


def test_a_mask_that_no_later_node_widens_keeps_its_shape() -> None:
    """The scores have a single row, so the output gets its rows from the mask."""
    proto = hidden()
    (scores,) = [value for value in proto.graph.input if value.name == "scores"]
    scores.CopyFrom(graphs.edge("scores", ["batch", HEADS, 1, "seq"]))
    assert ands(proto) == ["shown"]


def test_dimensions_of_different_names_are_not_assumed_to_be_equal() -> None:
    proto = hidden()
    (scores,) = [value for value in proto.graph.input if value.name == "scores"]
    scores.CopyFrom(graphs.edge("scores", ["batch", HEADS, "queries", "seq"]))
    assert [node.name for node in dropped(proto).graph if node.op_type == "And"] == ["shown"]


def test_a_graph_output_of_the_same_shape_keeps_its_name() -> None:
    proto = hidden("const")
    proto.graph.output.append(graphs.edge("shown", dtype=TensorProto.BOOL))
    assert ands(proto) == ["shown"]


def test_a_softmax_over_the_widened_rows_keeps_them() -> None:
    """The Softmax runs over the rows that the true condition adds to the mask."""
    proto = hidden()
    (add,) = [node for node in proto.graph.node if node.name == "y"]
    add.input[1] = "parts"
    at = [*proto.graph.node].index(add)
    proto.graph.node.insert(at, helper.make_node("Softmax", ["number"], ["parts"], name="parts", axis=2))
    assert ands(proto) == ["shown"]


def test_a_constant_that_is_false_for_one_head_stays() -> None:
    proto = hidden("const")
    (yes,) = [tensor for tensor in proto.graph.initializer if tensor.name == "yes"]
    yes.CopyFrom(graphs.initializer("yes", np.array([True, False, True]).reshape(1, HEADS, 1, 1)))
    assert ands(proto) == ["shown"]


def test_an_and_with_only_one_true_operand_is_not_always_true() -> None:
    """The inner And is a graph output, so it is still there when the outer one is examined."""
    proto = hidden("fed")
    proto.graph.output.append(graphs.edge("both", dtype=TensorProto.BOOL))
    assert ands(proto) == ["both", "shown"]


def test_less_is_not_less_or_equal() -> None:
    proto = hidden(op="LessOrEqual")
    (holds,) = [node for node in proto.graph.node if node.name == "holds"]
    holds.op_type = "Less"
    assert ands(proto) == ["shown"]


def rewritten(proto: ModelProto) -> ir.Model:
    return run([InferTypes(), GatherAllToUnsqueeze(), DropUnused()], ir.from_proto(proto))


def ops(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


@pytest.mark.parametrize(
    "axes",
    [((1, 2, 3), (0, 1, 2)), ((1,), (0,)), ((0, 2), (0, 1)), ((-1, -2), (0, 1)), ((1, 2), (-3, -2)), ((1,), (0, 1))],
    ids=str,
)
def test_a_look_up_of_all_elements_becomes_unsqueeze(axes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    proto = looked_up(axes=axes)
    made = rewritten(proto)
    assert ops(made) == ["Unsqueeze"]
    assert [node.name for node in made.graph] == ["y"]
    before, after = (open_session(each.SerializeToString()) for each in (proto, ir.to_proto(made)))
    for sizes in SIZES:
        fed = feeds(proto, sizes)
        expected, found = before.run(None, fed)[0], after.run(None, fed)[0]
        assert np.shape(found) == np.shape(expected)
        assert np.array_equal(found, expected)


def with_other(name: str, **edit: object) -> ModelProto:
    """Return the look-up with another operator, other inputs or another axis at the node ``name``."""
    proto = looked_up()
    (node,) = [each for each in proto.graph.node if each.name == name]
    if "op" in edit:
        node.op_type = str(edit["op"])
    if "input" in edit:
        node.input[:] = list(edit["input"])  # type: ignore[call-overload]
    if "axis" in edit:
        node.attribute[0].i = int(str(edit["axis"]))
    return proto


def of_another_name() -> ModelProto:
    """Return a look-up at the positions of another sequence, which may be shorter than the mask's."""
    return looked_up(limit="other")


OTHERS = {
    "the other way round": looked_up(swapped=True),
    "not from the first": looked_up(start=1),
    "every second": looked_up(step=2),
    "of another size": of_another_name(),
    "in batches": looked_up(batch_dims=1),
    "rows behind columns": looked_up(axes=((0, 1, 2), (1, 2, 3))),
    "one axis for both": looked_up(axes=((1,), (1,))),
    "joined along another axis": with_other("indices", axis=3),
    "joined by Max": with_other("indices", op="Max"),
    "of something else": with_other("at_rows", op="Squeeze", input=["wide_rows"]),
    "one part twice": with_other("indices", input=["at_rows", "at_rows"]),
    "expanded in another way": with_other("wide_rows", input=["columns", "both"]),
    "made of sums": with_other("wide_rows", op="Add", input=["rows", "columns"]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_look_ups_are_not_rewritten(name: str) -> None:
    assert "GatherND" in ops(rewritten(OTHERS[name]))


def test_a_look_up_that_repeats_elements_is_not_rewritten() -> None:
    """The ranges are also expanded along an axis of size 4."""
    proto = looked_up(axes=((1, 2), (0, 1)))
    proto.graph.initializer.append(graphs.initializer("four", np.asarray([1, 4, 1], np.int64)))
    (both,) = [node for node in proto.graph.node if node.name == "both"]
    proto.graph.node.remove(both)
    for node in proto.graph.node:
        if node.op_type == "Expand":
            node.input[1] = "four"
    assert "GatherND" in ops(rewritten(proto))


def test_before_unsqueeze_takes_its_axes_as_an_input_nothing_is_rewritten() -> None:
    made = ir.from_proto(looked_up())
    run([InferTypes()], made)
    made.opset_imports[""] = 12
    assert not GatherAllToUnsqueeze().apply(made)


def test_a_look_up_of_a_diagonal_is_not_rewritten() -> None:
    """Both positions run along one axis of the output; with batch_dims, one position per row does the same."""
    proto = looked_up(axes=((1,), (1,)))
    for value in (*proto.graph.input, *proto.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            dim.dim_param = "seq"
    assert "GatherND" in ops(rewritten(proto))
    d = Drawing()
    rows = d.add("Unsqueeze", d.positions(0), d.const("axes", [1]), to="rows")
    d.add("GatherND", "mask", d.add("Concat", rows, to="indices", axis=-1), to="y", batch_dims=1)
    assert "GatherND" in ops(rewritten(model(d, {"mask": ["seq", "seq"]}, "y", TensorProto.BOOL)))


def test_a_look_up_of_a_single_repeated_position_is_not_rewritten() -> None:
    """A range of one position is expanded along its own axis, or runs along the axis that joins positions."""
    proto = looked_up(axes=((1, 2), (0, 1)))
    for value in (*proto.graph.input, *proto.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == "batch":
                dim.dim_value = 1
    proto.graph.initializer.append(graphs.initializer("four", np.asarray([4, 1, 1], np.int64)))
    for node in proto.graph.node:
        if node.op_type == "Expand":
            node.input[1] = "four"
    assert "GatherND" in ops(rewritten(proto))
    d = Drawing()
    d.add("GatherND", "mask", d.add("Concat", d.positions(0), to="indices", axis=-1), to="y")
    proto = model(d, {"mask": ["seq"]}, "y", TensorProto.BOOL)
    for value in (*proto.graph.input, *proto.graph.value_info):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    assert "GatherND" in ops(rewritten(proto))
