"""Products of the same activations become nodes of up to three, with the bits of single ones."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from layers import Array, answers, ours
from lowered import Lowered, lower
from onnx import ModelProto, helper

import graphs
from bf16kit.converter.plan.decisions import Islands
from bf16kit.numerics.rounding import to_bf16, to_fp32

K = 40
COLUMNS = (64, 32, 96, 32, 64)
BATCH: dict[str, Array] = {"x": graphs.values(2, 3, K, seed=7) * 2}


def branches(count: int, *, bias: bool = True, first: int = 0) -> ModelProto:
    """Return x [batch, seq, K] → products ``p0``, ``p1`` … below ``count``, of 64, 32 … columns → ``y0``, ``y1`` …"""
    nodes, outputs, weights = [], [], dict[str, Array]()
    for i in range(first, count):
        nodes.append(f"[p{i}] {'m' if bias else 'y'}{i} = MatMul (x, w{i})")
        outputs.append(f"float[batch, seq, {COLUMNS[i]}] y{i}")
        weights[f"w{i}"] = graphs.values(K, COLUMNS[i], seed=i)
        if bias:
            nodes.append(f"[a{i}] y{i} = Add (m{i}, b{i})")
            weights[f"b{i}"] = graphs.values(COLUMNS[i], seed=10 + i)
    return graphs.parsed(f"(float[batch, seq, {K}] x) => ({', '.join(outputs)}) {{ {' '.join(nodes)} }}", **weights)


def names(made: Lowered, profile: str = "cpu") -> list[tuple[str, str]]:
    """Return name and operator of the kernel's nodes."""
    return [(node.name, node.op_type) for node in ours(made, profile)]


@pytest.mark.long
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("count", "sizes"), [(2, [2]), (3, [3]), (4, [3, 1]), (5, [3, 2])])
def test_joined_products_give_the_bits_of_single_ones_and_float64_s_result(
    count: int, sizes: list[int], bias: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proto = branches(count, bias=bias)
    made = lower(tmp_path / "joined" / "1", proto, profiles=["cpu", "cpu-bf16"])
    single = [
        lower(tmp_path / "single" / str(1 + i), branches(i + 1, bias=bias, first=i), profiles=["cpu", "cpu-bf16"])
        for i in range(count)
    ]
    firsts = [f"p{sum(sizes[:place])}" for place in range(len(sizes))]
    for profile, rounds in (("cpu", ""), ("cpu-bf16", "Bf16")):
        operators = [f"MatMul{size if size > 1 else ''}{rounds}_panels{'_bias' * bias}" for size in sizes]
        assert names(made, profile) == list(zip(firsts, operators, strict=True))
        assert len(made.ops(profile)) == len(sizes)
        onnx.checker.check_model(str(made.artifact.file(f"{profile}.onnx")), full_check=True)
        found, bits = answers(made, BATCH, monkeypatch, profile), [each.run_kernel(BATCH, profile) for each in single]
        x = to_fp32(to_bf16(BATCH["x"])) if rounds else BATCH["x"]
        for i in range(count):
            expected = x.astype(np.float64) @ made.artifact.tensor(f"w{i}").astype(np.float64)
            expected += graphs.values(COLUMNS[i], seed=10 + i) if bias else 0
            np.testing.assert_array_equal(found[0][f"y{i}"].view(np.uint32), bits[i][f"y{i}"].view(np.uint32))
            for result in found:
                np.testing.assert_allclose(result[f"y{i}"], expected, rtol=1e-5, atol=4e-6)


def test_at_most_three_products_become_one_node(tmp_path: Path) -> None:
    made = lower(tmp_path / "m" / "1", branches(5))
    assert names(made) == [("p0", "MatMul3_panels_bias"), ("p3", "MatMul2_panels_bias")]


def test_the_joined_node_is_where_the_first_product_was(tmp_path: Path) -> None:
    """A node may read the first result before the second product is due."""
    proto = branches(3)
    proto.graph.node.insert(2, helper.make_node("Exp", ["y0"], ["e"]))
    proto.graph.node.append(helper.make_node("Abs", ["e"], ["d"]))
    proto.graph.output.append(graphs.edge("d"))
    made = lower(tmp_path / "m" / "1", proto)
    assert made.ops("cpu") == ["MatMul3_panels_bias", "Exp", "Abs"]
    source = made.run_source(BATCH)["d"]
    for given in (made.run_cpu(BATCH), made.run_kernel(BATCH)):
        np.testing.assert_allclose(given["d"], source, rtol=5e-2, atol=1e-1)


@pytest.mark.parametrize(
    ("second", "alone"),
    [
        ("[p1] m1 = MatMul (x, w1) s1 = Add (m1, b1) y1 = Relu (s1)", "MatMul_panels_bias_relu"),
        ("[p1] y1 = MatMul (x, w1)", "MatMul_panels"),
        ("[p1] m1 = MatMul (x, narrow) y1 = Add (m1, n)", "MatMul_panels_tail_bias"),
        ("negative = Neg (x) [p1] m1 = MatMul (negative, w1) y1 = Add (m1, b1)", "MatMul_panels_bias"),
    ],
    ids=["an activation follows", "no bias", "a narrower panel", "it reads something else"],
)
def test_a_product_that_differs_is_not_joined(second: str, alone: str, tmp_path: Path) -> None:
    proto = graphs.parsed(
        f"""(float[batch, seq, {K}] x) => (float[batch, seq, 64] y0, float[] y1, float[batch, seq, 96] y2) {{
            [p0] m0 = MatMul (x, w0) y0 = Add (m0, b0) {second} [p2] m2 = MatMul (x, w2) y2 = Add (m2, b2)
        }}""",
        **{f"w{i}": graphs.values(K, COLUMNS[i], seed=i) for i in range(3)},
        **{f"b{i}": graphs.values(COLUMNS[i], seed=10 + i) for i in range(3)},
        narrow=graphs.values(K, 50),
        n=graphs.values(50),
    )
    made = lower(tmp_path / "m" / "1", proto)
    assert names(made) == [("p0", "MatMul2_panels_bias"), ("p1", alone)]
    for name, array in made.run_source(BATCH).items():
        np.testing.assert_allclose(made.run_cpu(BATCH)[name], array, atol=5e-2)


def test_a_product_that_is_kept_in_fp32_is_not_joined_with_those_that_round(tmp_path: Path) -> None:
    islands = Islands(nodes={"p1": "why"})
    made = lower(tmp_path / "m" / "1", branches(3, bias=False), profiles=["cpu-bf16"], islands=islands)
    assert names(made, "cpu-bf16") == [("p0", "MatMul2Bf16_panels"), ("p1", "MatMul_panels")]
