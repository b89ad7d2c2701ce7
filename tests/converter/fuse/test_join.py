from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from layers import Array, ours
from lowered import Lowered, lower
from onnx import ModelProto, NodeProto, helper

import graphs
from bf16kit.runtime.loading import load
from bf16kit.runtime.ort.kernel import VARIABLE
from converter.fuse import fuse as module
from converter.fuse.join import groups

K = 40
COLUMNS = (64, 32, 96, 32, 64)


def branches(
    count: int, *, bias: bool = True, after: Sequence[NodeProto] = (), outputs: Sequence[str] = ()
) -> ModelProto:
    """Return a graph: x [batch, seq, K] → ``count`` products of 64, 32, 96 … columns, each with its own bias or none.

    The products are named ``p0``, ``p1`` … and give ``y0``, ``y1`` …, which are the outputs unless ``outputs`` names
    others. The nodes in ``after`` follow the products.
    """
    nodes, weights = [], []
    for i in range(count):
        nodes.append(helper.make_node("MatMul", ["x", f"w{i}"], [f"m{i}" if bias else f"y{i}"], name=f"p{i}"))
        weights.append(graphs.initializer(f"w{i}", graphs.values(K, COLUMNS[i], seed=i)))
        if bias:
            nodes.append(helper.make_node("Add", [f"m{i}", f"b{i}"], [f"y{i}"], name=f"a{i}"))
            weights.append(graphs.initializer(f"b{i}", graphs.values(COLUMNS[i], seed=10 + i)))
    given = outputs or [f"y{i}" for i in range(count)]
    return graphs.model(
        [*nodes, *after], [graphs.edge("x", ["batch", "seq", K])], [graphs.edge(name) for name in given], weights
    )


def batch() -> dict[str, Array]:
    return {"x": graphs.values(2, 3, K, seed=7) * 2}


def nodes(made: Lowered) -> list[tuple[str, str, list[str]]]:
    """Return name, operator and outputs of the kernel's nodes."""
    return [(node.name, node.op_type, [*node.output]) for node in ours(made)]


def unjoined(target: Path, proto: ModelProto, monkeypatch: pytest.MonkeyPatch) -> Lowered:
    with monkeypatch.context() as patch:
        patch.setattr(module, "groups", lambda graph: [])
        return lower(target, proto)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("count", "sizes"), [(2, [2]), (3, [3]), (4, [3, 1]), (5, [3, 2])])
def test_products_of_the_same_activations_become_nodes_of_up_to_three(
    count: int, sizes: list[int], bias: bool, tmp_path: Path
) -> None:
    made = lower(tmp_path / "m" / "1", branches(count, bias=bias))
    suffix = "_bias" if bias else ""
    expected, first = [], 0
    for size in sizes:
        operator = f"MatMul{size if size > 1 else ''}_panels{suffix}"
        expected.append((f"p{first}", operator, [f"y{i}" for i in range(first, first + size)]))
        first += size
    assert nodes(made) == expected
    assert len(made.ops("cpu")) == len(sizes)
    model = onnx.load(made.artifact.file("cpu.onnx"), load_external_data=False)
    assert sorted(function.name for function in model.functions) == sorted(operator for _, operator, _ in expected)
    onnx.checker.check_model(str(made.artifact.file("cpu.onnx")), full_check=True)


def test_the_node_has_the_inputs_and_attributes_that_the_kernel_reads(tmp_path: Path) -> None:
    (node,) = ours(lower(tmp_path / "m" / "1", branches(3)))
    assert [*node.input] == ["x", "w0", "w1", "w2", "b0", "b1", "b2"]
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    assert attributes == {
        "k": K,
        "n1": 64,
        "n2": 32,
        "n3": 96,
        "panels1": [2, K, 32],
        "panels2": [1, K, 32],
        "panels3": [3, K, 32],
        "matrix1": [K, 64],
        "matrix2": [K, 32],
        "matrix3": [K, 96],
    }


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_joined_products_give_the_bits_of_single_ones_and_float64_s_result(
    count: int, bias: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proto = branches(count, bias=bias)
    made = lower(tmp_path / "joined" / "1", proto)
    single = unjoined(tmp_path / "single" / "1", proto, monkeypatch)
    assert len(ours(single)) == count
    monkeypatch.setenv(VARIABLE, "off")
    fallback = load(made.artifact, "cpu").run(batch())
    monkeypatch.delenv(VARIABLE)
    results, bits = made.run_kernel(batch()), single.run_kernel(batch())
    for i in range(count):
        expected = batch()["x"].astype(np.float64) @ made.artifact.tensor(f"w{i}").astype(np.float64)
        expected += graphs.values(COLUMNS[i], seed=10 + i) if bias else 0
        np.testing.assert_array_equal(results[f"y{i}"].view(np.uint32), bits[f"y{i}"].view(np.uint32))
        for result in (results, fallback):
            np.testing.assert_allclose(result[f"y{i}"], expected, rtol=1e-5, atol=4e-6)


def test_the_joined_node_is_where_the_first_product_was(tmp_path: Path) -> None:
    """A node may read the first result before the second product is due, and before its bias is computed."""
    proto = branches(2, after=[helper.make_node("Sub", ["e", "y1"], ["d"])], outputs=("d",))
    (bias,) = [each for each in proto.graph.initializer if each.name == "b1"]
    bias.CopyFrom(graphs.initializer("b1", graphs.values(1, 1, 64, seed=11)))
    (weight,) = [each for each in proto.graph.initializer if each.name == "w1"]
    weight.CopyFrom(graphs.initializer("w1", graphs.values(K, 64, seed=1)))
    proto.graph.node.insert(2, helper.make_node("Exp", ["y0"], ["e"]))
    made = lower(tmp_path / "m" / "1", proto)
    assert made.ops("cpu") == ["Reshape", "MatMul2_panels_bias", "Exp", "Sub"]
    source = made.run_source(batch())["d"]
    np.testing.assert_allclose(made.run_cpu(batch())["d"], source, rtol=5e-2, atol=1e-1)
    np.testing.assert_allclose(made.run_kernel(batch())["d"], source, rtol=5e-2, atol=1e-1)


def _activated() -> ModelProto:
    proto = branches(3, outputs=("y0", "r", "y2"))
    proto.graph.node.insert(4, helper.make_node("Relu", ["y1"], ["r"]))
    return proto


def _without_a_bias() -> ModelProto:
    proto = branches(3)
    proto.graph.node[2].output[0] = "y1"
    del proto.graph.node[3]
    return proto


def _narrower() -> ModelProto:
    proto = branches(3)
    for name, columns in (("w1", (K, 50)), ("b1", (50,))):
        (tensor,) = [each for each in proto.graph.initializer if each.name == name]
        tensor.CopyFrom(graphs.initializer(name, graphs.values(*columns)))
    return proto


def _other_activations() -> ModelProto:
    proto = branches(3)
    proto.graph.node[2].input[0] = "n"
    proto.graph.node.insert(2, helper.make_node("Neg", ["x"], ["n"]))
    return proto


@pytest.mark.parametrize(
    ("proto", "alone"),
    [
        pytest.param(_activated(), "MatMul_panels_bias_relu", id="an activation follows"),
        pytest.param(_without_a_bias(), "MatMul_panels", id="no bias"),
        pytest.param(_narrower(), "MatMul_panels_tail_bias", id="its last panel is narrower"),
        pytest.param(_other_activations(), "MatMul_panels_bias", id="it reads something else"),
    ],
)
def test_a_product_that_differs_is_not_joined(proto: ModelProto, alone: str, tmp_path: Path) -> None:
    made = lower(tmp_path / "m" / "1", proto)
    assert [(name, operator) for name, operator, _ in nodes(made)] == [("p0", "MatMul2_panels_bias"), ("p1", alone)]
    for name, array in made.run_source(batch()).items():
        np.testing.assert_allclose(made.run_cpu(batch())[name], array, atol=5e-2)


def test_a_reshaped_bias_that_another_node_reads_too_stays_where_it_is() -> None:
    """If the Reshape moved behind its other reader, the graph would be out of order."""
    made = [
        helper.make_node("Reshape", ["b", "shape"], ["flat"], name="reshape"),
        helper.make_node("Add", ["x", "flat"], ["other"], name="reader"),
    ]
    for i, bias in enumerate(("flat", "c")):
        node = helper.make_node("MatMul_panels_bias", ["x", f"w{i}", bias], [f"y{i}"], name=f"p{i}", domain="bf16kit")
        node.attribute.extend([helper.make_attribute("k", 32), helper.make_attribute("n", 32)])
        made.append(node)
    weights = [graphs.initializer(name, graphs.values(32 * 32)) for name in ("w0", "w1")]
    weights += [graphs.initializer("b", graphs.values(1, 32)), graphs.initializer("c", graphs.values(32))]
    weights.append(graphs.initializer("shape", np.array([32])))
    outputs = [graphs.edge(name) for name in ("y0", "y1", "other")]
    model = ir.from_proto(graphs.model(made, [graphs.edge("x", ["rows", 32])], outputs, weights))
    assert groups(model.graph) == []
