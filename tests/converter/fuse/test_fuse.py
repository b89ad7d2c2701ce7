"""Fusions in one pass: each node belongs to one, and none that fails costs the conversion."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import attending
import numpy as np
import onnx
import onnx.compose
import onnx_ir as ir
import pytest
from attending import Spelling
from layers import Array, ours
from lowered import lower, relative_l2
from normed import WIDTH
from onnx import ModelProto, TensorProto, helper

import graphs
from bf16kit.converter.convert import convert
from bf16kit.converter.fuse.functions import Fusing
from bf16kit.converter.fuse.fuse import fuse
from bf16kit.converter.fuse.multiply import Epilogue, epilogue
from bf16kit.converter.fuse.products import Product
from bf16kit.converter.graph.types import infer_types, run
from bf16kit.converter.options import Options, parse_target


def _two_norms_of_one_sum() -> ModelProto:
    """Return x → s = x·W + x; the normalisations of s with two weights; their products' sum, added to s (GPT-NeoX)."""
    rows = {name: graphs.values(WIDTH, seed=9 + i) for i, name in enumerate(["g1", "b1", "g2", "b2"])}
    return graphs.parsed(
        f"""(float[batch, seq, {WIDTH}] x) => (float[batch, seq, {WIDTH}] y) {{
            [a] a = MatMul (x, w0) [s] s = Add (a, x)
            [n1] n1 = LayerNormalization <axis = -1> (s, g1, b1) [n2] n2 = LayerNormalization <axis = -1> (s, g2, b2)
            [p] p = MatMul (n1, w1) [q] q = MatMul (n2, w2) [r] r = Add (p, q) [y] y = Add (r, s)
        }}""",
        **{f"w{i}": graphs.values(WIDTH, WIDTH, seed=i) for i in range(3)},
        **rows,
    )


def test_of_two_normalisations_of_one_sum_the_first_computes_it(tmp_path: Path) -> None:
    made = lower(tmp_path / "m" / "1", _two_norms_of_one_sum())
    product = "MatMul_panels_tail"
    kinds = [product, "AddLayerNorm_bias_sum", "LayerNormalization", product, product, "Add", "Add"]
    assert made.ops("cpu") == kinds
    feeds = {"x": graphs.values(2, 3, WIDTH, seed=5)}
    assert relative_l2(made.run_source(feeds)["y"], made.run_cpu(feeds)["y"]) < 1e-2


def _attention_then_rms() -> ModelProto:
    """Return an attention whose merged heads are RMS-normalised (BitNet)."""
    width = Spelling().heads * attending.WIDTH
    normal = graphs.parsed(
        f"""(float[batch, queries, {width}] heads) => (float[batch, queries, {width}] z) {{
            [sq] sq = Pow (heads, two) [mean] mean = ReduceMean (sq, last) [shifted] shifted = Add (mean, epsilon)
            [root] root = Sqrt (shifted) [normal] normal = Div (heads, root) [z] z = Mul (normal, g)
        }}""",
        two=np.array(2, np.float32),
        last=np.array([-1]),
        epsilon=np.array(1e-6, np.float32),
        g=graphs.values(width),
    )
    return onnx.compose.merge_models(attending.attention(Spelling()), normal, [("y", "heads")])


def test_a_normalisation_right_after_attention_reads_the_kernel_s_node(tmp_path: Path) -> None:
    made = lower(tmp_path / "m" / "1", _attention_then_rms())
    assert made.ops("cpu") == ["Attention_rrr_mask", "RmsNorm"]
    feeds = attending.feeds(Spelling())
    np.testing.assert_allclose(made.run_cpu(feeds)["z"], made.run_source(feeds)["z"], rtol=2e-5, atol=4e-6)
    without = lower(tmp_path / "without" / "1", _attention_then_rms(), refused={"mean": "why"})
    assert [node.op_type for node in ours(without)] == ["Attention_rrr_mask"]


def _with_a_second_selection() -> ModelProto:
    """Return attention whose scores are selected by ``mask`` [batch, 1, queries, keys], then by ``seen``."""
    proto = attending.attention(Spelling(mask="where"))
    (softmax,) = [node for node in proto.graph.node if node.op_type == "Softmax"]
    selected = helper.make_node("Where", ["seen", softmax.input[0], "low"], ["selected"], name="selected")
    softmax.input[0] = "selected"
    proto.graph.node.insert([*proto.graph.node].index(softmax), selected)
    proto.graph.input.append(graphs.edge("seen", ["batch", 1, 1, "keys"], TensorProto.BOOL))
    proto.graph.initializer.append(graphs.initializer("low", np.array(attending.LOWEST, np.float32)))
    return proto


def _masks(keys: int = 5) -> dict[str, tuple[Array, Array]]:
    causal = np.tril(np.ones((keys, keys), bool))[None, None].repeat(2, 0)
    left = np.ones((2, 1, 1, keys), bool)
    left[..., :2] = False
    drawn = np.random.default_rng(0)
    return {
        "causal, nothing padded": (causal, np.ones_like(left)),
        "causal, padded on the left: rows hidden by both": (causal, left),
        "everything hidden by both": (np.zeros_like(causal), np.zeros_like(left)),
        "random": (drawn.random(causal.shape) > 0.5, drawn.random(left.shape) > 0.5),
    }


@pytest.mark.parametrize("which", _masks())
def test_two_selections_hide_what_either_hides(which: str, tmp_path: Path) -> None:
    """Their numbers are the lowest there are: added up, they would be minus infinity, and a hidden row NaN."""
    made = lower(tmp_path / "m" / "1", _with_a_second_selection())
    assert sorted(made.ops("cpu")) == ["Attention_rrr_mask", "Where", "Where"]
    mask, seen = _masks()[which]
    feeds = attending.feeds(Spelling(mask="where"), queries=5, keys=5) | {"mask": mask, "seen": seen}
    np.testing.assert_allclose(made.run_cpu(feeds)["y"], made.run_source(feeds)["y"], rtol=2e-5, atol=4e-6)


def test_a_selection_after_an_added_mask_replaces_it(tmp_path: Path) -> None:
    """An added mask may be positive, as position biases are, so the lower of the two would be wrong."""
    proto = _with_a_second_selection()
    (where,) = [node for node in proto.graph.node if node.op_type == "Where" and node.name != "selected"]
    where.op_type, where.input[:] = "Add", [where.input[1], "mask"]
    proto.graph.input[3].CopyFrom(graphs.edge("mask", ["batch", 1, "queries", "keys"]))
    made = lower(tmp_path / "m" / "1", proto)
    assert sorted(made.ops("cpu")) == ["Attention_rrr_mask", "Where"]
    bias = graphs.values(2, 1, 5, 5, seed=3) * 3
    feeds = attending.feeds(Spelling(), queries=5, keys=5) | {"mask": bias, "seen": _masks()["random"][1]}
    np.testing.assert_allclose(made.run_cpu(feeds)["y"], made.run_source(feeds)["y"], rtol=2e-5, atol=4e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_a_product_refused_after_its_weight_was_stored_in_panels_reads_the_matrix(tied: bool, tmp_path: Path) -> None:
    proto = graphs.mlp((32, 64, 64, 32))
    if tied:  # the second layer's weight is the third's too, so both stay
        proto = graphs.mlp((32, 32, 32, 32))
        (last,) = [node for node in proto.graph.node if node.name == "matmul2"]
        last.input[1] = "w1"
    panels = {"w0": 1, "w1": 1} if tied else {"w0": 1, "w1": 1, "w2": 1}
    made = lower(tmp_path / "m" / "1", proto, panels=panels, refused={"matmul1": "why"})
    assert [node.name for node in ours(made)] == (["matmul0"] if tied else ["matmul0", "matmul2"])
    reasons = {entry.name: entry.reason for entry in made.plan.nodes["cpu"]}
    assert "CPU kernel" not in reasons["matmul1"]
    feeds = {"x": graphs.values(4, 32, seed=9)}
    assert relative_l2(made.run_source(feeds)["y"], made.run_cpu(feeds)["y"]) < 1e-2


def _convert_without_matmul1(proto: ModelProto, directory: Path) -> Sequence[str]:
    """Convert ``proto``, check that the kernel computes the products but for ``matmul1``, and return the notes."""
    onnx.save(proto, directory / "m.onnx")
    target = parse_target(directory / "r" / "m" / "1")
    options = Options(source=directory / "m.onnx", target=target, formats=("onnx",), profiles=("cpu",), report=False)
    result = convert(options)
    graph = onnx.load(result.artifact.file("cpu.onnx"), load_external_data=False).graph
    assert [node.name for node in graph.node if node.domain == "bf16kit"] == ["matmul0", "matmul2"]
    result.artifact.verify()
    return [note for note in result.notes if "'matmul1'" in note]


def test_a_conversion_does_not_die_of_a_fusion_and_its_owner_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes after the graph has been changed."""
    real = Fusing.replace

    def failing(self: Fusing, *given: object, **more: object) -> None:
        real(self, *given, **more)  # type: ignore[arg-type]
        if any(node.name == "matmul1" and node.domain == "bf16kit" for node in self.graph):
            raise KeyError("matmul1")

    monkeypatch.setattr(Fusing, "replace", failing)
    (note,) = _convert_without_matmul1(graphs.mlp((32, 64, 64, 32)), tmp_path)
    assert "KeyError: 'matmul1'" in note
    assert "slower" in note


_TWO = {  # the node `broken` is invalid, in a way that is found while the kernel's nodes are chosen
    "MatMul": "[broken] b = MatMul (x) [sound] y = MatMul (x, w)",
    "Conv": """[broken] b = Conv <auto_pad = "SAME_UPPER", strides = [1]> (x, v)
        [sound] y = Conv <pads = [1, 1, 1, 1]> (x, w)""",
}


@pytest.mark.parametrize("op", _TWO)
def test_an_error_while_the_kernel_s_nodes_are_chosen_leaves_out_the_node(op: str) -> None:
    shape, weight = ("batch, 64, 16, 16", (64, 64, 3, 3)) if op == "Conv" else ("batch, 64", (64, 64))
    text = f"(float[{shape}] x) => (float[{shape}] y, float[a] b) {{ {_TWO[op]} }}"
    model = run([infer_types], ir.from_proto(graphs.parsed(text, w=graphs.values(*weight), v=graphs.values(*weight))))
    _, fusions = fuse(model, {"w", "v"}, convolutions=True)
    assert [fusion.node for fusion in fusions.made] == ["sound"]
    assert fusions.refused.keys() == {"broken"}


def test_nothing_is_said_about_a_node_without_inputs() -> None:
    text = """(float[batch, 64] x) => (float[batch, 64] y, float[2] z) {
        [noise] z = RandomNormal <shape = [2]> () [product] y = MatMul (x, w)
    }"""
    model = run([infer_types], ir.from_proto(graphs.parsed(text, w=graphs.values(64, 64))))
    _, fusions = fuse(model, {"w"})
    assert [fusion.node for fusion in fusions.made] == ["product"]
    assert not fusions.refused


@pytest.mark.long
def test_a_wrong_fusion_is_undone_before_it_is_published_and_its_owner_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result is off by less than the budget."""

    def without_bias(found: Product) -> Epilogue:
        after = epilogue(found)
        return replace(after, bias=None) if found.node.name == "matmul1" else after

    monkeypatch.setattr("bf16kit.converter.fuse.multiply.epilogue", without_bias)
    proto = graphs.mlp((32, 64, 64, 32))
    (bias,) = [tensor for tensor in proto.graph.initializer if tensor.name == "b1"]
    bias.CopyFrom(graphs.initializer("b1", graphs.values(64) * np.float32(1e-3)))
    (note,) = _convert_without_matmul1(proto, tmp_path)
    assert "times the fp32 noise allowed" in note
