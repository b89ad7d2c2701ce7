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
