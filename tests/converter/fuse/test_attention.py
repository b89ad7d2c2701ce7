from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attending
import numpy as np
import onnx_ir as ir
import pytest
from attending import Spelling
from onnx import ModelProto, NodeProto, helper

import graphs
from converter.fuse.attention import Attention, SelectionMask, attention
from converter.graph.types import InferTypes


def found(proto: ModelProto) -> list[Attention]:
    model = ir.from_proto(proto)
    InferTypes()(model)
    return [each for node in model.graph if (each := attention(node)) is not None]


def node(proto: ModelProto, op: str, last: bool = False) -> NodeProto:
    named = [each for each in proto.graph.node if each.op_type == op]
    return named[-1 if last else 0]


def const(proto: ModelProto, name: str, array: Any) -> None:
    """Set the initializer ``name`` to ``array``."""
    kept = [each for each in proto.graph.initializer if each.name != name]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend([*kept, graphs.initializer(name, np.asarray(array, np.float32))])


def test_attention_extends_from_query_key_and_value_to_the_merged_heads() -> None:
    (whole,) = found(attending.attention(Spelling()))
    values = whole.q.value.name, whole.k.value.name, whole.v.value.name
    assert (values, whole.layouts, whole.scale) == (("q", "k", "v"), "rrr", 0.25)
    assert [each.name for each in whole.masks if isinstance(each, ir.Value)] == ["mask"]
    assert (whole.q.heads, whole.k.heads, whole.q.columns, whole.v.columns) == (4, 4, 8, 16)
    assert [each.op_type for each in whole.nodes] == [
        *("MatMul", "Mul", "Add", "Softmax", "MatMul", "Transpose", "Reshape")
    ]


@pytest.mark.parametrize(("mask", "hides"), [("where", False), ("where_not", True)])
def test_a_selection_of_a_number_that_no_score_reaches_is_a_mask(mask: str, hides: bool) -> None:
    (whole,) = found(attending.attention(Spelling(mask=mask)))
    (choice,) = whole.masks
    assert isinstance(choice, SelectionMask)
    assert (choice.condition.name, choice.hides, choice.number) == ("mask", hides, attending.LOWEST)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_heads_that_are_repeated_for_groups_are_read_once(kv_heads: int) -> None:
    spelling = Spelling(kv_heads=kv_heads)
    (whole,) = found(attending.attention(spelling, {"batch": 2, "queries": 5, "keys": 7}))
    assert (whole.k.value.name, whole.k.heads, whole.v.heads) == ("k", kv_heads, kv_heads)


def _number_that_scores_reach(proto: ModelProto) -> None:
    const(proto, node(proto, "Where").input[2], -10000.0)


def _softmax_over_queries(proto: ModelProto) -> None:
    node(proto, "Softmax").attribute[0].i = 2


def _weights_on_the_right(proto: ModelProto) -> None:
    product = node(proto, "MatMul", last=True)
    product.input[:] = [*reversed(product.input)]


def _heads_left_apart(proto: ModelProto) -> None:
    del node(proto, "Transpose", last=True).attribute[:]
    node(proto, "Transpose", last=True).attribute.append(helper.make_attribute("perm", [0, 1, 2, 3]))


def _heads_in_another_order(proto: ModelProto) -> None:
    turned = node(proto, "Transpose")
    del turned.attribute[:]
    turned.attribute.append(helper.make_attribute("perm", [2, 0, 1, 3]))


def _scaled_after_the_mask(proto: ModelProto) -> None:
    softmax = node(proto, "Softmax")
    scaled = helper.make_node("Mul", [softmax.input[0], node(proto, "Mul").input[1]], ["late"], name="late")
    softmax.input[0] = "late"
    nodes = [*proto.graph.node]
    nodes.insert(nodes.index(softmax), scaled)
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)


def _a_factor_for_each_key(proto: ModelProto) -> None:
    const(proto, node(proto, "Mul").input[1], np.ones(7))


@pytest.mark.parametrize(
    ("change", "spelling"),
    [
        (_number_that_scores_reach, Spelling(mask="where")),
        (_softmax_over_queries, Spelling()),
        (_weights_on_the_right, Spelling(mask="none")),
        (_heads_left_apart, Spelling()),
        (_heads_in_another_order, Spelling()),
        (_scaled_after_the_mask, Spelling()),
        (_a_factor_for_each_key, Spelling()),
    ],
)
def test_other_computations_are_not_recognised_as_attention(
    change: Callable[[ModelProto], None], spelling: Spelling
) -> None:
    proto = attending.attention(spelling)
    assert len(found(proto)) == 1
    change(proto)
    assert found(proto) == []


@pytest.mark.parametrize(
    "shape", [("more", 1, "queries", "keys"), ("batch", 1, "queries", "others"), (1, 1, 1, 1, "keys")]
)
def test_attention_with_a_mask_not_known_to_fit_the_scores_is_not_recognised(shape: tuple[int | str, ...]) -> None:
    assert found(attending.attention(Spelling(mask_shape=shape))) == []


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_attention_with_batches_not_known_to_be_equal_is_not_recognised(name: str) -> None:
    proto = attending.attention(Spelling(forms="hhh", mask="none"))
    (value,) = (each for each in proto.graph.input if each.name == name)
    value.type.tensor_type.shape.dim[0].dim_param = "others"
    assert found(proto) == []


def test_values_that_are_scaled_keep_their_factor() -> None:
    proto = attending.attention(Spelling())
    product = node(proto, "MatMul", last=True)
    nodes = [*proto.graph.node]
    nodes.insert(nodes.index(product), helper.make_node("Mul", [product.input[1], "c0"], ["doubled"], name="doubled"))
    const(proto, "two", 2.0)
    nodes[nodes.index(product) - 1].input[1] = "two"
    product.input[1] = "doubled"
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    (whole,) = found(proto)
    assert (whole.layouts, whole.v.value.name, whole.scale) == ("rrh", "doubled", 0.25)


def test_keys_that_are_an_output_as_well_are_still_read_in_rows() -> None:
    proto = attending.attention(Spelling(turn="two"))
    turned = next(each for each in proto.graph.node if [*each.attribute] and [*each.attribute[0].ints] == [0, 1, 3, 2])
    proto.graph.output.append(graphs.edge(turned.input[0]))
    (whole,) = found(proto)
    assert (whole.layouts, whole.k.value.name) == ("rrr", "k")


def test_a_reshape_that_keeps_heads_apart_is_not_a_merge() -> None:
    proto = attending.attention(Spelling(merged="matrix"))
    sizes = node(proto, "Reshape", last=True).input[1]
    kept = [each for each in proto.graph.initializer if each.name != sizes]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend([*kept, graphs.initializer(sizes, np.array([0, -1, 0, 1, attending.WIDTH]))])
    proto.graph.output[0].CopyFrom(graphs.edge("y"))
    assert found(proto) == []
