from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from lowered import lower, relative_l2
from onnx import ModelProto, helper

import graphs
from bf16kit.artifact.manifest import Plan
from bf16kit.messages.errors import UsageError
from converter.plan import make_plan
from converter.plan.decisions import Islands
from converter.rewrite import prepare


def _plan(proto: ModelProto, **options: Any) -> Plan:
    return make_plan(prepare(ir.from_proto(proto)), **options).plan


def _nodes(plan: Plan, profile: str = "cuda") -> dict[str, tuple[str, str]]:
    return {entry.name: (entry.precision, entry.reason) for entry in plan.nodes[profile]}


def test_matrices_become_bf16_and_one_dimensional_tensors_stay_fp32() -> None:
    plan = _plan(graphs.mlp((32, 64, 32)))
    assert {t.name: t.precision for t in plan.tensors} == {"w0": "bf16", "w1": "bf16", "b0": "fp32", "b1": "fp32"}
    assert all(entry.reason for entry in (*plan.tensors, *plan.nodes["cpu"], *plan.nodes["cuda"]))


def test_every_node_of_every_profile_is_in_the_plan(tmp_path: Path) -> None:
    made = lower(tmp_path / "m" / "1", graphs.if_branches())
    assert made.precision("cuda") == {"choice": "fp32", "then_matmul": "fp32", "else_matmul": "fp32"}
    assert made.precision("cpu").keys() == made.precision("cuda").keys()


def test_the_cpu_plan_states_what_the_kernel_runs_and_which_weights_are_widened() -> None:
    """Every node computes in fp32; the reasons state which weights stay bf16 in memory."""
    proto = graphs.mlp((32, 64, 32))
    proto.graph.node.append(helper.make_node("MatMul", ["w0", "y_t"], ["z"], name="left"))
    proto.graph.node.insert(5, helper.make_node("Transpose", ["a0"], ["y_t"], name="turn", perm=[1, 0]))
    proto.graph.output.append(graphs.edge("z", [32, "batch"]))
    nodes = _nodes(_plan(proto), "cpu")
    assert {precision for precision, _ in nodes.values()} == {"fp32"}
    assert nodes["matmul1"][1] == "bf16 weight, fp32 activations and accumulation in the CPU kernel"
    assert nodes["add1"][1] == "computed by the CPU kernel together with the product before it"
    assert nodes["left"][1] == nodes["matmul0"][1] == "computes in fp32, from a bf16 weight that is widened at load"
    assert nodes["relu0"][1] == "the cpu profile computes in fp32"


def test_the_cpu_bf16_profile_rounds_only_the_activations_of_the_kernel_s_products() -> None:
    proto = graphs.mlp((32, 64, 32))
    plan = _plan(proto, profiles=["cpu", "cpu-bf16"], islands=Islands(nodes={"matmul0": "why"}))
    nodes = _nodes(plan, "cpu-bf16")
    assert nodes["matmul0"] == ("fp32", "why")
    assert nodes["matmul1"][0] == "bf16"
    assert "activations rounded to bf16" in nodes["matmul1"][1]
    assert {name: nodes[name] for name in nodes if "matmul" not in name} == {
        name: entry for name, entry in _nodes(plan, "cpu").items() if "matmul" not in name
    }


def test_the_kernel_s_profiles_share_one_copy_of_the_weights(tmp_path: Path) -> None:
    """The copy is in panels, whichever of the profiles are written."""
    both = lower(tmp_path / "a" / "1", graphs.mlp((32, 64, 32)), profiles=["cpu", "cpu-bf16"])
    alone = lower(tmp_path / "b" / "1", graphs.mlp((32, 64, 32)), profiles=["cpu-bf16"])
    assert [t.panels for t in both.artifact.manifest.tensors if t.dtype == "bfloat16"] == [1, 1]
    assert alone.artifact.manifest.tensors == both.artifact.manifest.tensors


def test_normalisations_stay_fp32_unless_bf16_is_requested() -> None:
    """On MiniLM this reduces the drift by an eighth. The products around them stay bf16."""
    proto = graphs.parsed(
        """(float[batch, 32] x) => (float[batch, 32] y) {
            [product] m = MatMul (x, w) [norm] n = LayerNormalization (m, scale) [product2] y = MatMul (n, v)
        }""",
        w=graphs.values(32, 32),
        v=graphs.values(32, 32, seed=1),
        scale=np.ones(32, np.float32),
    )
    nodes = _nodes(_plan(proto))
    assert [nodes[name][0] for name in ("product", "norm", "product2")] == ["bf16", "fp32", "bf16"]
    assert "normalisation" in nodes["norm"][1]
    assert _nodes(_plan(proto, bf16=["norm"]))["norm"][0] == "bf16"


def test_an_operator_without_a_kernel_is_an_island_with_that_reason_even_if_bf16_is_requested() -> None:
    proto = graphs.parsed(
        """(float[batch, 8, 8, 8] x) => (float[batch, 16, h, w] y) {
            [conv] c = Conv (x, w) [pool] p = MaxPool <kernel_shape = [2, 2]> (c) [conv2] y = Conv (p, v)
        }""",
        w=graphs.values(16, 8, 3, 3),
        v=graphs.values(16, 16, 3, 3, seed=1),
    )
    nodes = _nodes(_plan(proto, bf16=["pool"]))
    assert nodes["conv"] == ("bf16", "bf16 multiplication with fp32 accumulation")
    assert nodes["pool"] == ("fp32", "no bf16 kernel for MaxPool-22 on CUDA in ONNX Runtime 1.31.1")
    assert nodes["conv2"][0] == "bf16"


def _lstm() -> ModelProto:
    """Return a graph: x [seq, batch, 16] → LSTM of 32 → MatMul → y."""
    return graphs.parsed(
        """(float[seq, batch, 16] x) => (float[seq, batch, 16] y) {
            [lstm] h = LSTM <hidden_size = 32> (x, w, r) [squeeze] s = Squeeze (h, axis) [matmul] y = MatMul (s, v)
        }""",
        w=graphs.values(1, 128, 16),
        r=graphs.values(1, 128, 32, seed=1),
        v=graphs.values(32, 16, seed=2),
        axis=np.array([1]),
    )


def test_an_lstm_computes_in_fp32_from_weights_stored_in_bf16(tmp_path: Path) -> None:
    made = lower(tmp_path / "m" / "1", _lstm())
    assert made.precision() == {"lstm": "fp32", "squeeze": "fp32", "matmul": "bf16"}
    assert made.size("weights.fp32") == 0
    feeds = {"x": np.random.default_rng(0).standard_normal((5, 2, 16)).astype(np.float32)}
    source = made.run_source(feeds)["y"]
    np.testing.assert_array_equal(made.run_reference(feeds)["y"], source)
    for answer in (made.run_cpu(feeds)["y"], made.run_emulated(feeds)["y"]):
        assert relative_l2(source, answer) < 1e-2


def _positions() -> ModelProto:
    """Return a graph: ids → angles (positions × frequencies) → cos, times an embedding → MatMul → y.

    At position 511, bf16 would be off by 1.
    """
    return graphs.parsed(
        """(int64[batch, 1] ids) => (float[batch, 32] y) {
            [to_float] p = Cast <to = 1> (ids) [angle] angle = Mul (p, frequency) [cos] cos = Cos (angle)
            [embed] h = Gather (table, ids) [squeeze] e = Squeeze (h, axis) [rotate] r = Mul (e, cos)
            [project] y = MatMul (r, w)
        }""",
        frequency=1 / 10 ** np.linspace(0, 4, 32, dtype=np.float32),
        table=graphs.values(512, 32),
        w=graphs.values(32, 32, seed=1),
        axis=np.array([1]),
    )


def test_positions_stay_fp32_until_they_are_combined_with_activations(tmp_path: Path) -> None:
    made = lower(tmp_path / "m" / "1", _positions())
    precision = made.precision()
    assert [precision[n] for n in ("to_float", "angle", "cos")] == ["fp32"] * 3
    assert [precision[n] for n in ("embed", "squeeze", "rotate", "project")] == ["bf16"] * 4
    feeds = {"ids": np.array([[511], [3], [200]])}
    assert relative_l2(made.run_source(feeds)["y"], made.run_emulated(feeds)["y"]) < 1e-2


def test_cheap_nodes_between_islands_stay_fp32() -> None:
    proto = graphs.parsed(
        """(float[batch, 16] x) => (float[16, batch] y) {
            [elu] a = Elu (x) [relu] b = Relu (a) [transpose] c = Transpose <perm = [1, 0]> (b) [elu2] y = Elu (c)
        }"""
    )
    nodes = _nodes(_plan(proto))
    alone = ("fp32", "no bf16 product is near it, so casts would cost more than bf16 saves")
    assert nodes["relu"] == nodes["transpose"] == alone


def test_a_move_of_fp32_data_stays_fp32_and_its_result_is_cast(tmp_path: Path) -> None:
    text = (
        "(float[16, batch] x) => (float[batch, 16] y) { [t] t = Transpose <perm = [1, 0]> (x) [m] y = MatMul (t, w) }"
    )
    made = lower(tmp_path / "m" / "1", graphs.parsed(text, w=graphs.values(16, 16)))
    assert _nodes(made.plan)["t"] == ("fp32", "moves fp32 data")
    assert made.ops("cuda") == ["Transpose", "Cast", "MatMul", "Cast"]


def test_a_node_kept_in_fp32_keeps_its_weights_in_fp32_and_fp32_wins_where_both_overrides_match() -> None:
    plan = _plan(graphs.mlp((32, 64, 32)), keep_fp32=["^matmul1$"])
    assert {t.name: t.precision for t in plan.tensors}["w1"] == "fp32"
    assert {name: precision for name, (precision, _) in _nodes(plan).items() if "matmul" in name} == {
        "matmul0": "bf16",
        "matmul1": "fp32",
    }
    both = _plan(graphs.mlp((32, 64, 32)), bf16=["."], keep_fp32=["w0"])
    assert {t.name: t.precision for t in both.tensors} == {"w0": "fp32", "w1": "bf16", "b0": "bf16", "b1": "bf16"}


def test_a_tensor_requested_in_bf16_is_stored_in_bf16(tmp_path: Path) -> None:
    made = lower(tmp_path / "m" / "1", graphs.mlp((32, 64, 32)), bf16=["^b0$"])
    feeds = {"x": graphs.values(4, 32, seed=9)}
    assert made.artifact.tensor("b0").dtype.name == "bfloat16"
    assert relative_l2(made.run_source(feeds)["y"], made.run_cpu(feeds)["y"]) < 6e-3


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"keep_fp32": ["("]}, r"--keep-fp32 \(: not a regular expression"),
        ({"bf16": ["layer.9"]}, "--bf16 layer.9: matches no node or tensor"),
    ],
)
def test_a_useless_override_is_an_error(options: dict[str, list[str]], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        _plan(graphs.mlp(), **options)


def test_every_entry_has_a_code_beside_its_reason() -> None:
    plan = _plan(_lstm())
    assert {entry.name: entry.code for entry in plan.tensors} == {"r": "matrix", "v": "matrix", "w": "matrix"}
    codes = {entry.name: entry.code for entry in plan.nodes["cuda"]}
    assert codes == {"lstm": "no_kernel", "squeeze": "moves", "matmul": "product"}
    kept = _plan(_lstm(), keep_fp32=["matmul"])
    assert {entry.code for entry in kept.nodes["cuda"] if entry.name == "matmul"} == {"kept"}
    assert {entry.code for entry in kept.tensors if entry.name == "v"} == {"kept"}


def test_a_search_keeps_nodes_and_weights_in_fp32_independently() -> None:
    """Unlike with --keep-fp32, a product may compute in fp32 from a weight that is stored in bf16."""
    plan = _plan(graphs.mlp((32, 64, 32)), islands=Islands({"matmul0": "because"}, {"w1": "of the budget"}))
    nodes = {entry.name: (entry.precision, entry.code, entry.reason) for entry in plan.nodes["cuda"]}
    tensors = {entry.name: (entry.precision, entry.code, entry.reason) for entry in plan.tensors}
    assert nodes["matmul0"] == ("fp32", "budget", "because")
    assert nodes["matmul1"][0] == "bf16"
    assert tensors["w1"] == ("fp32", "budget", "of the budget")
    assert tensors["w0"][0] == "bf16"
