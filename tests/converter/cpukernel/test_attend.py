from __future__ import annotations

from itertools import product
from pathlib import Path

import attending
import numpy as np
import onnx
import pytest
from attending import Spelling
from layers import ours
from lowered import lower
from onnx import NodeProto, helper
from onnx.reference import ReferenceEvaluator

import graphs
from bf16kit.runtime.kernel import VARIABLE
from bf16kit.runtime.loading import load

SPELLINGS = [
    *(Spelling(forms="".join(form)) for form in product("rh", repeat=3)),
    *(Spelling(scale=scale) for scale in ("div", "q", "both", "rows", "none")),
    *(Spelling(mask=mask) for mask in ("add_first", "where", "where_not", "two", "none")),
    Spelling(turn="two"),
    *(Spelling(mask_shape=shape) for shape in (("batch", 1, 1, "keys"), (1, 4, "queries", 1), ("keys",))),
    *(Spelling(forms=forms, kv_heads=kv_heads) for forms, kv_heads in product(("rrr", "hhh", "rhr"), (1, 2))),
]


def lowered_sizes(spelling: Spelling) -> dict[str, int]:
    """Where heads are repeated, sizes are fixed: ONNX's inference does not follow names through that."""
    return {} if spelling.heads == spelling.kv_heads else {"batch": 2, "queries": 5, "keys": 7}


@pytest.mark.parametrize("spelling", SPELLINGS, ids=str)
def test_every_spelling_becomes_one_node_that_gives_float64_s_result_with_and_without_the_kernel(
    spelling: Spelling, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = lower(tmp_path / "m" / "1", attending.attention(spelling, lowered_sizes(spelling)))
    (node,) = ours(made)
    grouped = "_grouped" if spelling.heads != spelling.kv_heads else ""
    masked = "" if spelling.mask == "none" else "_mask"
    assert (node.name, node.op_type, [*node.output]) == (
        "weights",
        f"Attention_{spelling.forms}{grouped}{masked}",
        ["y"],
    )
    assert set(made.ops("cpu")) <= {node.op_type, "Where", "Add"}
    fed = attending.feeds(spelling)
    expected = attending.exact(spelling, fed)
    np.testing.assert_allclose(made.run_kernel(fed)["y"], expected, rtol=2e-5, atol=4e-6)
    monkeypatch.setenv(VARIABLE, "off")
    np.testing.assert_allclose(load(made.artifact, "cpu").run(fed)["y"], expected, rtol=2e-5, atol=4e-6)
    with np.errstate(over="ignore"):  # two masks that hide the same key
        evaluated = ReferenceEvaluator(onnx.load(made.artifact.file("cpu.onnx"))).run(None, fed)
    assert isinstance(evaluated, list)
    np.testing.assert_allclose(evaluated[0], expected, rtol=2e-5, atol=4e-6)


def test_rows_that_end_in_one_matrix_keep_the_reshape_that_puts_them_there(tmp_path: Path) -> None:
    spelling = Spelling(merged="matrix")
    made = lower(tmp_path / "m" / "1", attending.attention(spelling))
    assert made.ops("cpu") == ["Attention_rrr_mask", "Reshape"]
    fed = attending.feeds(spelling)
    np.testing.assert_allclose(made.run_kernel(fed)["y"], attending.exact(spelling, fed), rtol=2e-5, atol=4e-6)


def test_the_node_has_what_the_kernel_and_its_function_read(tmp_path: Path) -> None:
    (node,) = ours(lower(tmp_path / "m" / "1", attending.attention(Spelling())))
    assert [*node.input] == ["q", "k", "v", "mask"]
    assert {a.name: helper.get_attribute_value(a) for a in node.attribute} == {
        "heads": 4,
        "kv_heads": 4,
        "scale": 0.25,
        "heads_of_q": [0, 0, 4, attending.DEPTH],
        "heads_of_k": [0, 0, 4, attending.DEPTH],
        "heads_of_v": [0, 0, 4, attending.WIDTH],
        "merged": [0, 0, 4 * attending.WIDTH],
    }


def test_the_plan_says_who_computes_the_nodes_that_are_gone(tmp_path: Path) -> None:
    made = lower(tmp_path / "m" / "1", attending.attention(Spelling()))
    reasons = {entry.name: entry.reason for entry in made.plan.nodes["cpu"]}
    for name in ("scores", "weights", "summed", "y"):
        assert reasons[name] == "done by the CPU kernel's attention"


def _second(made: onnx.ModelProto, extra: NodeProto) -> onnx.ModelProto:
    made.graph.node.append(extra)
    made.graph.output.append(graphs.edge(extra.output[0]))
    return made


@pytest.mark.parametrize("value", ["scores", "weights", "summed"])
def test_what_others_read_too_is_left_alone(value: str, tmp_path: Path) -> None:
    proto = _second(attending.attention(Spelling()), helper.make_node("Abs", [value], ["other"], name="other"))
    made = lower(tmp_path / "m" / "1", proto)
    assert ours(made) == []
    fed = attending.feeds(Spelling())
    np.testing.assert_allclose(made.run_cpu(fed)["y"], attending.exact(Spelling(), fed), rtol=2e-5, atol=4e-6)


def test_a_choice_that_two_layers_share_becomes_one_mask(tmp_path: Path) -> None:
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
