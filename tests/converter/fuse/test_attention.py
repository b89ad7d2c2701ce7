"""Attention, however it is written, becomes one node that gives float64's result; what is not attention stays."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import attending
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from attending import Spelling
from layers import answers, ours
from lowered import lower, relative_l2
from onnx import ModelProto, NodeProto, helper

import graphs
from bf16kit.converter.fuse.attention import attention
from bf16kit.converter.graph.types import infer_types
from bf16kit.converter.plan.decisions import Islands
from bf16kit.numerics.rounding import to_bf16, to_fp32

PROFILE = "cpu-bf16"
SPELLINGS = [
    *(Spelling(forms="".join(form)) for form in product("rh", repeat=3)),
    *(Spelling(scale=scale) for scale in ("div", "q", "both", "rows", "none")),
    *(Spelling(mask=mask) for mask in ("add_first", "where", "where_not", "two", "none")),
    Spelling(turn="two"),
    *(Spelling(mask_shape=shape) for shape in (("batch", 1, 1, "keys"), (1, 4, "queries", 1), ("keys",))),
    *(Spelling(forms=forms, kv_heads=kv_heads) for forms, kv_heads in product(("rrr", "hhh", "rhr"), (1, 2))),
]
TOLERANCES = {"cpu": (2e-5, 4e-6), PROFILE: (2.0**-9, 2.0**-7)}


@pytest.mark.parametrize(
    ("forms", "queries", "keys", "fused"), [("hhh", 2, 16, 0), ("hhh", 1, 16, 1), ("hhh", 2, 17, 1), ("rhh", 2, 16, 1)]
)
def test_few_keys_are_fused_only_if_rows_are_read_or_for_one_query(
    forms: str, queries: int, keys: int, fused: int, tmp_path: Path
) -> None:
    proto = attending.attention(Spelling(forms=forms), {"queries": queries, "keys": keys})
    made = lower(tmp_path / "m" / "1", proto, profiles=[*TOLERANCES])
    assert [len(ours(made, profile)) for profile in TOLERANCES] == [fused, fused]


@pytest.mark.parametrize("spelling", SPELLINGS, ids=str)
def test_every_spelling_becomes_one_node_that_gives_float64_s_result(
    spelling: Spelling, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grouped = spelling.heads != spelling.kv_heads  # ONNX's inference does not follow names through repeated heads
    proto = attending.attention(spelling, {"batch": 2, "queries": 5, "keys": 17} if grouped else {})
    made = lower(tmp_path / "m" / "1", proto, profiles=[*TOLERANCES])
    fed = attending.feeds(spelling, keys=17 if grouped else 7)
    unrounded = attending.exact(spelling, fed)
    rounded = attending.exact(spelling, fed | {name: to_fp32(to_bf16(fed[name])) for name in "qkv"})
    for profile, (relative, absolute) in TOLERANCES.items():
        (node,) = ours(made, profile)
        stem = "AttentionBf16" if profile == PROFILE else "Attention"
        op_type = f"{stem}_{spelling.forms}{'_grouped' * grouped}{'_mask' * (spelling.mask != 'none')}"
        assert (node.name, node.op_type, [*node.output]) == ("summed", op_type, ["y"])
        assert set(made.ops(profile)) <= {node.op_type, "Where", "Add"}
        onnx.checker.check_model(str(made.artifact.file(f"{profile}.onnx")), full_check=True)
        expected = rounded if profile == PROFILE else unrounded
        with np.errstate(over="ignore"):  # two masks that hide the same key
            found = [each["y"] for each in answers(made, fed, monkeypatch, profile)]
        for answer in found:
            np.testing.assert_allclose(answer, expected, rtol=relative, atol=absolute)
            if profile == PROFILE:
                error = np.abs(answer - expected).max()
                assert np.abs(answer - unrounded).max() > 2 * error, "q, k and v were not rounded"
                assert error > 1e-4, "p was not rounded"
        # The definition rounds where the kernel does. So the two are far closer to each other than to a result without
        # rounding, except for an exponential between two bf16 numbers.
        assert relative_l2(*found[:2]) < {"cpu": 1e-6, PROFILE: 1e-3}[profile]


def test_attention_with_a_node_kept_in_fp32_rounds_nothing(tmp_path: Path) -> None:
    for name in ("scores", "weights", "summed"):
        islands = Islands(nodes={name: "why"})
        made = lower(tmp_path / name / "1", attending.attention(Spelling()), profiles=[PROFILE], islands=islands)
        assert made.ops(PROFILE) == ["Attention_rrr_mask"]
        assert {entry.code for entry in made.plan.nodes[PROFILE] if entry.precision == "bf16"} == set()


def test_a_selection_that_two_layers_share_becomes_one_mask(tmp_path: Path) -> None:
    spelling = Spelling(mask="where")
    first = attending.attention(spelling)
    second = onnx.compose.add_prefix(attending.attention(spelling), "b_", rename_inputs=False)
    first.graph.node.extend(second.graph.node)
    first.graph.initializer.extend(second.graph.initializer)
    first.graph.output.extend(second.graph.output)
    made = lower(tmp_path / "m" / "1", first)
    assert sorted(made.ops("cpu")) == ["Attention_rrr_mask", "Attention_rrr_mask", "Where"]
    found = made.run_kernel(attending.feeds(spelling))
    assert np.array_equal(found["y"], found["b_y"])


def _found(proto: ModelProto) -> int:
    model = ir.from_proto(proto)
    infer_types(model)
    return sum(attention(node) is not None for node in model.graph)


def _node(proto: ModelProto, op: str, place: int = 0) -> NodeProto:
    return [each for each in proto.graph.node if each.op_type == op][place]


def _const(proto: ModelProto, name: str, array: Any) -> None:
    (tensor,) = [each for each in proto.graph.initializer if each.name == name]
    tensor.CopyFrom(graphs.initializer(name, np.asarray(array, np.float32)))


def _ordered(node: NodeProto, perm: list[int]) -> None:
    node.attribute[0].CopyFrom(helper.make_attribute("perm", perm))


def _scaled_after_the_mask(proto: ModelProto) -> None:
    softmax = _node(proto, "Softmax")
    scaled = helper.make_node("Mul", [softmax.input[0], _node(proto, "Mul").input[1]], ["late"], name="late")
    softmax.input[0] = "late"
    proto.graph.node.insert([*proto.graph.node].index(softmax), scaled)


def _read_by_another(value: str) -> Callable[[ModelProto], object]:
    return lambda proto: proto.graph.output.append(graphs.edge(value))


def _other_batch(name: str) -> Callable[[ModelProto], object]:
    def change(proto: ModelProto) -> None:
        (value,) = (each for each in proto.graph.input if each.name == name)
        value.type.tensor_type.shape.dim[0].dim_param = "others"

    return change


_HEADS = Spelling(forms="hhh", mask="none")
OTHERS: dict[str, tuple[Callable[[ModelProto], object], Spelling]] = {
    "a number that scores reach": (lambda p: _const(p, _node(p, "Where").input[2], -1e4), Spelling(mask="where")),
    "softmax over queries": (lambda p: setattr(_node(p, "Softmax").attribute[0], "i", 2), Spelling()),
    "weights on the right": (lambda p: _node(p, "MatMul", -1).input.reverse(), Spelling(mask="none")),
    "heads left apart": (lambda p: _ordered(_node(p, "Transpose", -1), [0, 1, 2, 3]), Spelling()),
    "heads in another order": (lambda p: _ordered(_node(p, "Transpose"), [2, 0, 1, 3]), Spelling()),
    "scaled after the mask": (_scaled_after_the_mask, Spelling()),
    "a factor for each key": (lambda p: _const(p, _node(p, "Mul").input[1], np.ones(7)), Spelling()),
    **{f"{value} read by another": (_read_by_another(value), Spelling()) for value in ("scores", "weights", "summed")},
    **{f"another batch of {name}": (_other_batch(name), _HEADS) for name in "qkv"},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_computations_are_not_recognised_as_attention(name: str) -> None:
    change, spelling = OTHERS[name]
    proto = attending.attention(spelling)
    assert _found(proto) == 1
    change(proto)
    assert _found(proto) == 0


@pytest.mark.parametrize(
    "shape", [("more", 1, "queries", "keys"), ("batch", 1, "queries", "others"), (1, 1, 1, 1, "keys")]
)
def test_attention_with_a_mask_not_known_to_fit_the_scores_is_not_recognised(shape: tuple[int | str, ...]) -> None:
    assert _found(attending.attention(Spelling(mask_shape=shape))) == 0
