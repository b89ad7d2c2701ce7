from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from lowered import lower, relative_l2
from onnx import ModelProto, helper

import graphs
from bf16kit.artifact.manifest import Plan
from bf16kit.converter.plan import make_plan
from bf16kit.converter.plan.decisions import Islands
from bf16kit.converter.rewrite import prepare
from bf16kit.messages.errors import UsageError

MLP = (32, 64, 32)  # w0 [32, 64], b0, w1 [64, 32], b1


def _plan(proto: ModelProto, **options: Any) -> Plan:
    return make_plan(prepare(ir.from_proto(proto)), **options).plan


def _tensors(plan: Plan) -> dict[str, tuple[str, str]]:
    return {entry.name: (entry.precision, entry.code) for entry in plan.tensors}


def _nodes(plan: Plan, profile: str = "cuda") -> dict[str, tuple[str, str]]:
    return {entry.name: (entry.precision, entry.code) for entry in plan.nodes[profile]}


def test_matrices_become_bf16_and_one_dimensional_tensors_stay_fp32() -> None:
    plan = _plan(graphs.mlp(MLP))
    matrix, vector = ("bf16", "matrix"), ("fp32", "vector")
    assert _tensors(plan) == {"w0": matrix, "w1": matrix, "b0": vector, "b1": vector}
    assert all(entry.reason for entry in (*plan.tensors, *plan.nodes["cpu"], *plan.nodes["cuda"]))
    text = "(float[batch, 16] x) => (float[batch, 300] y) { m = MatMul (x, w) y = Add (m, row) }"
    proto = graphs.parsed(text, w=graphs.values(16, 300), row=graphs.values(1, 300))
    assert _tensors(_plan(proto)) == {"w": matrix, "row": vector}


def test_constants_that_data_meets_element_by_element_stay_fp32() -> None:
    """A position of 2,000 in bf16 is wrong by 4, which no sample of 32 tokens shows; a scaled weight is a weight."""
    proto = graphs.parsed(
        """(float[64, 32] x, int64[64] at) => (float[64, 32] y) {
            angle = Gather (angles, at) cosine = Cos (angle) turned = Mul (x, cosine)
            sine = Sin (fixed) placed = Add (turned, sine) row = Gather (table, at) sum = Add (placed, row)
            scaled = Mul (weight, gain) y = MatMul (sum, scaled)
        }""",
        angles=graphs.values(64, 32),
        fixed=graphs.values(64, 32, seed=1),
        table=graphs.values(64, 32, seed=2),
        weight=graphs.values(32, 32, seed=3),
        gain=graphs.values(32, 32, seed=4),
    )
    operand, matrix = ("fp32", "operand"), ("bf16", "matrix")
    kept = {"angles": operand, "fixed": operand, "table": matrix, "weight": matrix, "gain": matrix}
    assert _tensors(_plan(proto)) == kept
    assert _tensors(_plan(proto, bf16=["fixed"]))["fixed"] == ("bf16", "asked_for")


def test_a_constant_that_is_cut_and_joined_many_times_is_planned_at_once() -> None:
    """40 cuts in two are 2^40 paths to what reads it: one by one they would keep a converter busy for days."""
    moves = (
        f"a{i}, b{i} = Split <num_outputs = 2> (w{i}) w{i + 1} = Concat <axis = 0> (b{i}, a{i})" for i in range(40)
    )
    text = f"(float[32, 32] x) => (float[32, 32] y) {{ w0 = Identity (w) {' '.join(moves)} y = Add (x, w40) }}"
    assert _tensors(_plan(graphs.parsed(text, w=graphs.values(32, 32)))) == {"w": ("fp32", "operand")}


def test_every_node_of_every_profile_is_in_the_plan(tmp_path: Path) -> None:
    made = lower(tmp_path / "m" / "1", graphs.if_branches())
    assert made.precision("cuda") == {"choice": "fp32", "then_matmul": "fp32", "else_matmul": "fp32"}
    assert made.precision("cpu").keys() == made.precision("cuda").keys()


def test_the_cpu_plan_states_what_the_kernel_runs_and_which_weights_are_widened() -> None:
    """Every node computes in fp32; the reasons state which weights stay bf16 in memory."""
    proto = graphs.mlp(MLP)
    proto.graph.node.append(helper.make_node("MatMul", ["w0", "y_t"], ["z"], name="left"))
    proto.graph.node.insert(5, helper.make_node("Transpose", ["a0"], ["y_t"], name="turn", perm=[1, 0]))
    proto.graph.output.append(graphs.edge("z", [32, "batch"]))
    plan = _plan(proto)
    assert set(_nodes(plan, "cpu").values()) == {("fp32", "profile")}
    reasons = {entry.name: entry.reason for entry in plan.nodes["cpu"]}
    assert reasons["matmul1"] == "bf16 weight, fp32 activations and accumulation in the CPU kernel"
    assert reasons["add1"] == "computed by the CPU kernel together with the product before it"
    assert reasons["left"] == reasons["matmul0"] == "computes in fp32, from a bf16 weight that is widened at load"
    assert reasons["relu0"] == "the cpu profile computes in fp32"


def test_the_cpu_bf16_profile_rounds_only_the_activations_of_the_kernel_s_products() -> None:
    islands = Islands(nodes={"matmul0": "why"})
    plan = _plan(graphs.mlp(MLP), profiles=["cpu", "cpu-bf16"], islands=islands)
    rounded, plain = _nodes(plan, "cpu-bf16"), _nodes(plan, "cpu")
    assert (rounded.pop("matmul0"), rounded.pop("matmul1")) == (("fp32", "budget"), ("bf16", "rounds"))
    assert rounded.items() < plain.items()


def test_the_kernel_s_profiles_share_one_copy_of_the_weights(tmp_path: Path) -> None:
    """The copy is in panels, whichever of the profiles are written."""
    both = lower(tmp_path / "a" / "1", graphs.mlp(MLP), profiles=["cpu", "cpu-bf16"])
    alone = lower(tmp_path / "b" / "1", graphs.mlp(MLP), profiles=["cpu-bf16"])
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
    product = ("bf16", "product")
    assert _nodes(_plan(proto)) == {"product": product, "norm": ("fp32", "normalises"), "product2": product}
    assert _nodes(_plan(proto, bf16=["norm"]))["norm"] == ("bf16", "asked_for")


def test_an_operator_without_a_kernel_is_an_island_with_that_reason_even_if_bf16_is_requested() -> None:
    proto = graphs.parsed(
        """(float[batch, 8, 8, 8] x) => (float[batch, 16, h, w] y) {
            [conv] c = Conv (x, w) [pool] p = MaxPool <kernel_shape = [2, 2]> (c) [conv2] y = Conv (p, v)
        }""",
        w=graphs.values(16, 8, 3, 3),
        v=graphs.values(16, 16, 3, 3, seed=1),
    )
    plan = _plan(proto, bf16=["pool"])
    product = ("bf16", "product")
    assert _nodes(plan) == {"conv": product, "pool": ("fp32", "no_kernel"), "conv2": product}
    said = {entry.name: entry.reason for entry in plan.nodes["cuda"]}
    assert said["pool"] == f"no bf16 kernel for MaxPool-22 on CUDA in ONNX Runtime {onnxruntime.__version__}"


def test_an_lstm_computes_in_fp32_from_weights_stored_in_bf16(tmp_path: Path) -> None:
    proto = graphs.parsed(
        """(float[seq, batch, 16] x) => (float[seq, batch, 16] y) {
            [lstm] h = LSTM <hidden_size = 32> (x, w, r) [squeeze] s = Squeeze (h, axis) [matmul] y = MatMul (s, v)
        }""",
        w=graphs.values(1, 128, 16),
        r=graphs.values(1, 128, 32, seed=1),
        v=graphs.values(32, 16, seed=2),
        axis=np.array([1]),
    )
    made = lower(tmp_path / "m" / "1", proto)
    no_kernel, moves, product = ("fp32", "no_kernel"), ("fp32", "moves"), ("bf16", "product")
    assert _nodes(made.plan) == {"lstm": no_kernel, "squeeze": moves, "matmul": product}
    assert set(_tensors(made.plan).values()) == {("bf16", "matrix")}
    assert made.size("weights.fp32") == 0
    feeds = {"x": np.random.default_rng(0).standard_normal((5, 2, 16)).astype(np.float32)}
    source = made.run_source(feeds)["y"]
    np.testing.assert_array_equal(made.run_reference(feeds)["y"], source)
    for answer in (made.run_cpu(feeds)["y"], made.run_emulated(feeds)["y"]):
        assert relative_l2(source, answer) < 1e-2


def test_positions_stay_fp32_until_they_are_combined_with_activations(tmp_path: Path) -> None:
    """At position 511, bf16 would be off by 1."""
    proto = graphs.parsed(
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
    made = lower(tmp_path / "m" / "1", proto)
    assert made.precision() == {
        **dict.fromkeys(("to_float", "angle", "cos"), "fp32"),
        **dict.fromkeys(("embed", "squeeze", "rotate", "project"), "bf16"),
    }
    feeds = {"ids": np.array([[511], [3], [200]])}
    assert relative_l2(made.run_source(feeds)["y"], made.run_emulated(feeds)["y"]) < 1e-2


def test_cheap_nodes_between_islands_stay_fp32() -> None:
    proto = graphs.parsed(
        """(float[batch, 16] x) => (float[16, batch] y) {
            [elu] a = Elu (x) [relu] b = Relu (a) [transpose] c = Transpose <perm = [1, 0]> (b) [elu2] y = Elu (c)
        }"""
    )
    nodes = _nodes(_plan(proto))
    assert nodes["relu"] == nodes["transpose"] == ("fp32", "alone")


def test_a_move_of_fp32_data_stays_fp32_and_its_result_is_cast(tmp_path: Path) -> None:
    text = (
        "(float[16, batch] x) => (float[batch, 16] y) { [t] t = Transpose <perm = [1, 0]> (x) [m] y = MatMul (t, w) }"
    )
    made = lower(tmp_path / "m" / "1", graphs.parsed(text, w=graphs.values(16, 16)))
    assert _nodes(made.plan)["t"] == ("fp32", "moves")
    assert made.ops("cuda") == ["Transpose", "Cast", "MatMul", "Cast"]


def test_a_node_kept_in_fp32_keeps_its_weights_in_fp32_and_fp32_wins_where_both_overrides_match() -> None:
    plan = _plan(graphs.mlp(MLP), keep_fp32=["^matmul1$"])
    assert _tensors(plan)["w1"] == ("fp32", "kept")
    assert (_nodes(plan)["matmul0"], _nodes(plan)["matmul1"]) == (("bf16", "product"), ("fp32", "kept"))
    asked = ("bf16", "asked_for")
    both = _plan(graphs.mlp(MLP), bf16=["."], keep_fp32=["w0"])
    assert _tensors(both) == {"w0": ("fp32", "kept"), "w1": asked, "b0": asked, "b1": asked}


def test_a_tensor_requested_in_bf16_is_stored_in_bf16(tmp_path: Path) -> None:
    made = lower(tmp_path / "m" / "1", graphs.mlp(MLP), bf16=["^b0$"])
    feeds = {"x": graphs.values(4, 32, seed=9)}
    assert made.artifact.tensor("b0").dtype.name == "bfloat16"
    assert relative_l2(made.run_source(feeds)["y"], made.run_cpu(feeds)["y"]) < 6e-3


@pytest.mark.parametrize("options", [{"keep_fp32": ["("]}, {"bf16": ["layer.9"]}])
def test_an_override_that_is_no_pattern_or_matches_nothing_is_an_error(options: dict[str, list[str]]) -> None:
    with pytest.raises(UsageError):
        _plan(graphs.mlp(), **options)


def test_a_search_keeps_nodes_and_weights_in_fp32_independently() -> None:
    """Unlike with --keep-fp32, a product may compute in fp32 from a weight that is stored in bf16."""
    plan = _plan(graphs.mlp(MLP), islands=Islands({"matmul0": "because"}, {"w1": "of the budget"}))
    budget, nodes, tensors = ("fp32", "budget"), _nodes(plan), _tensors(plan)
    assert (nodes["matmul0"], nodes["matmul1"]) == (budget, ("bf16", "product"))
    assert (tensors["w0"], tensors["w1"]) == (("bf16", "matrix"), budget)
    assert {entry.reason for entry in plan.nodes["cuda"] if entry.code == "budget"} == {"because"}
