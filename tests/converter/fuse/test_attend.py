from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path

import attending
import numpy as np
import onnx
import pytest
from attending import Spelling
from layers import Array, ours
from lowered import lower, relative_l2
from onnx import NodeProto, helper
from onnx.reference import ReferenceEvaluator

import graphs
from bf16kit.numerics.rounding import to_bf16, to_fp32
from bf16kit.runtime.loading import load
from bf16kit.runtime.ort.kernel import VARIABLE
from converter.plan.decisions import Islands

PROFILE = "cpu-bf16"
SPELLINGS = [
    *(Spelling(forms="".join(form)) for form in product("rh", repeat=3)),
    *(Spelling(scale=scale) for scale in ("div", "q", "both", "rows", "none")),
    *(Spelling(mask=mask) for mask in ("add_first", "where", "where_not", "two", "none")),
    Spelling(turn="two"),
    *(Spelling(mask_shape=shape) for shape in (("batch", 1, 1, "keys"), (1, 4, "queries", 1), ("keys",))),
    *(Spelling(forms=forms, kv_heads=kv_heads) for forms, kv_heads in product(("rrr", "hhh", "rhr"), (1, 2))),
]


def lowered_sizes(spelling: Spelling) -> dict[str, int]:
    """Return fixed sizes if heads are repeated: ONNX's inference does not follow names through that."""
    return {} if spelling.heads == spelling.kv_heads else {"batch": 2, "queries": 5, "keys": 7}


def rounded(fed: Mapping[str, Array]) -> dict[str, Array]:
    return {name: to_fp32(to_bf16(fed[name])) for name in "qkv"}


TOLERANCES = {"cpu": (2e-5, 4e-6), PROFILE: (2.0**-9, 2.0**-7)}


@pytest.mark.parametrize("profile", TOLERANCES)
@pytest.mark.parametrize("spelling", SPELLINGS, ids=str)
def test_every_spelling_becomes_one_node_that_gives_float64_s_result(
    spelling: Spelling, profile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proto = attending.attention(spelling, lowered_sizes(spelling))
    made = lower(tmp_path / "m" / "1", proto, profiles=["cpu", PROFILE])
    (node,) = ours(made, profile)
    stem = "AttentionBf16" if profile == PROFILE else "Attention"
    grouped = "_grouped" if spelling.heads != spelling.kv_heads else ""
    masked = "" if spelling.mask == "none" else "_mask"
    assert (node.name, node.op_type, [*node.output]) == (
        "summed",
        f"{stem}_{spelling.forms}{grouped}{masked}",
        ["y"],
    )
    assert set(made.ops(profile)) <= {node.op_type, "Where", "Add"}
    onnx.checker.check_model(str(made.artifact.file(f"{profile}.onnx")), full_check=True)
    fed = attending.feeds(spelling)
    unrounded = attending.exact(spelling, fed)
    expected = attending.exact(spelling, fed | rounded(fed)) if profile == PROFILE else unrounded
    answers = [made.run_kernel(fed, profile)["y"]]
    monkeypatch.setenv(VARIABLE, "off")
    answers.append(load(made.artifact, profile).run(fed)["y"])
    with np.errstate(over="ignore"):  # two masks that hide the same key
        evaluated = ReferenceEvaluator(onnx.load(made.artifact.file(f"{profile}.onnx"))).run(None, fed)
    assert isinstance(evaluated, list)
    for answer in (*answers, evaluated[0]):
        relative, absolute = TOLERANCES[profile]
        np.testing.assert_allclose(answer, expected, rtol=relative, atol=absolute)
        if profile == PROFILE:
            assert np.abs(answer - unrounded).max() > 2 * np.abs(answer - expected).max(), "q, k and v were not rounded"
            assert np.abs(answer - expected).max() > 1e-4, "p was not rounded"
    # The definition rounds where the kernel does. So the two are far closer to each other than to a result without
    # rounding, except for an exponential between two bf16 numbers.
    for answer in answers[1:]:
        assert relative_l2(answers[0], answer) < {"cpu": 1e-6, PROFILE: 1e-3}[profile]


def test_attention_with_a_node_kept_in_fp32_rounds_nothing(tmp_path: Path) -> None:
    for name in ("scores", "weights", "summed"):
        islands = Islands(nodes={name: "why"})
        made = lower(tmp_path / name / "1", attending.attention(Spelling()), profiles=[PROFILE], islands=islands)
        assert made.ops(PROFILE) == ["Attention_rrr_mask"]
        assert {entry.code for entry in made.plan.nodes[PROFILE] if entry.precision == "bf16"} == set()


def _second(made: onnx.ModelProto, extra: NodeProto) -> onnx.ModelProto:
    made.graph.node.append(extra)
    made.graph.output.append(graphs.edge(extra.output[0]))
    return made


@pytest.mark.parametrize("value", ["scores", "weights", "summed"])
def test_attention_with_inner_values_that_others_read_is_not_replaced(value: str, tmp_path: Path) -> None:
    proto = _second(attending.attention(Spelling()), helper.make_node("Abs", [value], ["other"], name="other"))
    made = lower(tmp_path / "m" / "1", proto)
    assert ours(made) == []
    fed = attending.feeds(Spelling())
    np.testing.assert_allclose(made.run_cpu(fed)["y"], attending.exact(Spelling(), fed), rtol=2e-5, atol=4e-6)


def test_a_selection_that_two_layers_share_becomes_one_mask(tmp_path: Path) -> None:
    spelling = Spelling(mask="where")
    first = attending.attention(spelling)
    second = onnx.compose.add_prefix(attending.attention(spelling), "b_", rename_inputs=False)
    first.graph.node.extend(second.graph.node)
    first.graph.initializer.extend(second.graph.initializer)
    first.graph.output.extend(second.graph.output)
    made = lower(tmp_path / "m" / "1", first)
    assert sorted(made.ops("cpu")) == ["Attention_rrr_mask", "Attention_rrr_mask", "Where"]
    fed = attending.feeds(spelling)
    answers = made.run_kernel(fed)
    assert np.array_equal(answers["y"], answers["b_y"])
