from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from layers import layer, ours
from lowered import lower
from onnx import ModelProto, NodeProto, TensorProto, helper

import graphs


@pytest.mark.parametrize(("layout", "n"), [("panels", 64), ("panels", 50), ("panels", 20), ("transposed", 50)])
def test_a_product_its_bias_and_its_activation_become_one_node(layout: str, n: int, tmp_path: Path) -> None:
    made = lower(tmp_path / "m" / "1", layer(n, layout, bias=True, activation="gelu"))
    (node,) = ours(made)
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    assert {name: attributes[name] for name in ("k", "n", "layout", "activation")} == {
        "k": 40,
        "n": n,
        "layout": layout.encode(),
        "activation": b"gelu",
    }
    assert [*node.input] == ["x", "w", "b"]
    assert [*node.output] == ["y"]
    others = [n.op_type for n in made.graph("cpu").node if n.domain == ""]
    assert others == (["Gather", "Cast"] if layout == "transposed" else [])
    (stored,) = [t for t in made.graph("cpu").initializer if t.name == "w"]
    assert (stored.data_type, [*stored.dims]) == (TensorProto.BFLOAT16, [n, 40] if layout == "transposed" else [40 * n])


def _product(nodes: Sequence[NodeProto], *more: TensorProto, outputs: Sequence[str] = ("y",)) -> ModelProto:
    """Return a graph where ``m`` is x [4, 16] · w [16, 32], ``nodes`` follow, and ``b`` is a bias."""
    return graphs.model(
        [helper.make_node("MatMul", ["x", "w"], ["m"], name="product"), *nodes],
        [graphs.edge("x", [4, 16])],
        [graphs.edge(name) for name in outputs],
        [graphs.initializer("w", graphs.values(16, 32)), graphs.initializer("b", graphs.values(32, seed=1)), *more],
    )


_ADD, _RELU = helper.make_node("Add", ["b", "m"], ["s"]), helper.make_node("Relu", ["s"], ["y"])


@pytest.mark.parametrize(
    ("proto", "ops"),
    [
        pytest.param(_product([_ADD, _RELU]), ["kernel"], id="bias on the left"),
        pytest.param(_product([_ADD, _RELU], outputs=("y", "m")), ["kernel", "Add", "Relu"], id="product is an output"),
        pytest.param(_product([_ADD, _RELU], outputs=("y", "s")), ["kernel", "Relu"], id="sum is an output"),
        pytest.param(
            _product([helper.make_node("Add", ["m", "m"], ["s"]), _RELU]),
            ["kernel", "Add", "Relu"],
            id="added to itself",
        ),
        pytest.param(
            _product(
                [helper.make_node("Add", ["m", "column"], ["s"]), _RELU],
                graphs.initializer("column", graphs.values(4, 1)),
            ),
            ["kernel", "Add", "Relu"],
            id="one number per row",
        ),
        pytest.param(
            _product(
                [helper.make_node("Add", ["m", "high"], ["s"]), _RELU],
                graphs.initializer("high", graphs.values(1, 1, 32)),
            ),
            ["kernel", "Add", "Relu"],
            id="a sum of more dimensions",
        ),
        pytest.param(
            _product([helper.make_node("Sum", ["m", "b"], ["s"]), _RELU]),
            ["kernel", "Sum", "Relu"],
            id="not an Add",
        ),
    ],
)
def test_only_a_plain_bias_and_the_activation_after_it_are_fused(
    proto: ModelProto, ops: list[str], tmp_path: Path
) -> None:
    made = lower(tmp_path / "m" / "1", proto)
    found = ["kernel" if node.domain == "bf16kit" else node.op_type for node in made.graph("cpu").node]
    assert found == ops
    feeds = {"x": graphs.values(4, 16, seed=9)}
    for name, array in made.run_source(feeds).items():
        np.testing.assert_allclose(made.run_cpu(feeds)[name], array, atol=3e-2)


def test_an_activation_is_not_fused_if_a_body_also_reads_the_product(tmp_path: Path) -> None:
    """Both branches of an If capture the product, which a fused node would not return."""
    proto = graphs.if_branches(32)
    head = [helper.make_node("MatMul", ["x0", "w"], ["x"], name="product"), helper.make_node("Relu", ["x"], ["r"])]
    nodes = [*head, *proto.graph.node]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    proto.graph.input[0].CopyFrom(graphs.edge("x0", ["batch", 16]))
    proto.graph.output.append(graphs.edge("r", ["batch", 32]))
    proto.graph.initializer.append(graphs.initializer("w", graphs.values(16, 32, seed=4)))
    made = lower(tmp_path / "m" / "1", proto)
    assert [node.output[0] for node in ours(made)] == ["x"]
    assert "Relu" in made.ops("cpu")


def test_a_reshape_between_a_product_and_its_activation_moves_after_both(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["m"], name="product"),
        helper.make_node("Reshape", ["m", "split"], ["s"]),
        helper.make_node("Relu", ["s"], ["y"]),
    ]
    proto = graphs.model(
        nodes,
        [graphs.edge("x", ["batch", 16])],
        [graphs.edge("y", ["half", 2, 48])],
        [
            graphs.initializer("w", graphs.values(16, 48)),
            graphs.initializer("b", graphs.values(48)),
            graphs.initializer("split", np.array([-1, 2, 48])),
        ],
    )
    made = lower(tmp_path / "m" / "1", proto)
    assert [(n.op_type, *n.output) for n in made.graph("cpu").node] == [
        ("MatMul_panels_tail_bias_relu", "product/product"),
        ("Reshape", "y"),
    ]
    feeds = {"x": graphs.values(4, 16, seed=3)}
    np.testing.assert_allclose(made.run_cpu(feeds)["y"], made.run_source(feeds)["y"], atol=2e-2)


def test_a_product_of_a_vector_is_replaced(tmp_path: Path) -> None:
    proto = graphs.model(
        [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Add", ["m", "b"], ["y"])],
        [graphs.edge("x", [16])],
        [graphs.edge("y", [48])],
        [graphs.initializer("w", graphs.values(16, 48)), graphs.initializer("b", graphs.values(48))],
    )
    made = lower(tmp_path / "m" / "1", proto)
    assert made.ops("cpu") == ["MatMul_panels_tail_bias"]
    feeds = {"x": graphs.values(16, seed=3)}
    np.testing.assert_allclose(made.run_cpu(feeds)["y"], made.run_source(feeds)["y"], atol=2e-2)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_gemm_is_a_product_with_its_bias(transposed: bool, bias: bool, tmp_path: Path) -> None:
    weight = graphs.values(16, 48)
    proto = graphs.model(
        [helper.make_node("Gemm", ["x", "w", "b"] if bias else ["x", "w"], ["y"], transB=int(transposed))],
        [graphs.edge("x", ["batch", 16])],
        [graphs.edge("y", ["batch", 48])],
        [
            graphs.initializer("w", np.ascontiguousarray(weight.T) if transposed else weight),
            graphs.initializer("b", graphs.values(48)),
        ],
    )
    made = lower(tmp_path / "m" / "1", proto)
    assert [node.op_type for node in ours(made)] == ["MatMul_panels_tail_bias" if bias else "MatMul_panels_tail"]
    feeds = {"x": graphs.values(4, 16, seed=3)}
    np.testing.assert_allclose(made.run_cpu(feeds)["y"], made.run_source(feeds)["y"], atol=2e-2)


def _excitation(pixels: int = 1) -> ModelProto:
    """Return a squeeze-and-excite: x [batch, 64, pixels, pixels] → Conv 1×1 to 32, Relu → Conv 1×1 to 64 → y."""
    size = [pixels, pixels]
    return graphs.model(
        [
            helper.make_node("Conv", ["x", "w", "b"], ["c"], name="reduce"),
            helper.make_node("Relu", ["c"], ["r"], name="relu"),
            helper.make_node("Conv", ["r", "v"], ["y"], name="expand", auto_pad="SAME_UPPER"),
        ],
        [graphs.edge("x", ["batch", 64, *size])],
        [graphs.edge("y", ["batch", 64, *size])],
        [
            graphs.initializer("w", graphs.values(32, 64, 1, 1)),
            graphs.initializer("b", graphs.values(32)),
            graphs.initializer("v", graphs.values(64, 32, 1, 1, seed=1)),
        ],
    )


def test_a_convolution_of_a_single_pixel_becomes_a_product(tmp_path: Path) -> None:
    made = lower(tmp_path / "m" / "1", _excitation())
    assert [node.op_type for node in ours(made)] == ["MatMul_transposed_bias_relu", "MatMul_transposed"]
    assert "Conv" not in made.ops("cpu")
    feeds = {"x": graphs.values(3, 64, 1, 1, seed=3)}
    source = made.run_source(feeds)["y"]
    assert source.shape == (3, 64, 1, 1)
    np.testing.assert_allclose(made.run_cpu(feeds)["y"], source, rtol=2e-2, atol=1e-1)
    np.testing.assert_array_equal(made.run_reference(feeds)["y"], source)
