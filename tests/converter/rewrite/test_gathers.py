from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from masking import Drawing, feeds, looked_up, model
from onnx import ModelProto, TensorProto

import graphs
from bf16kit.runtime.ort.session import open_session
from converter.graph.types import InferTypes
from converter.rewrite import run
from converter.rewrite.gathers import GatherAllToUnsqueeze
from converter.rewrite.unused import DropUnused

SIZES = [{"batch": b, "seq": s, "keys": s + 2} for b in (1, 2, 3) for s in (1, 2, 3, 5)]


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


def edited(name: str, **edit: object) -> ModelProto:
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
    "joined along another axis": edited("indices", axis=3),
    "joined by Max": edited("indices", op="Max"),
    "of something else": edited("at_rows", op="Squeeze", input=["wide_rows"]),
    "one part twice": edited("indices", input=["at_rows", "at_rows"]),
    "expanded in another way": edited("wide_rows", input=["columns", "both"]),
    "made of sums": edited("wide_rows", op="Add", input=["rows", "columns"]),
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
