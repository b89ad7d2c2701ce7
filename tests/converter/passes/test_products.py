from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from lowered import Lowered, lower
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper

import graphs
from bf16kit.errors import ConversionError
from bf16kit.runtime.kernel import LIBRARY, VARIABLE
from bf16kit.runtime.loading import load
from converter.passes import run
from converter.passes.products import UseKernel
from converter.passes.types import InferTypes

Array = NDArray[Any]

_ACTIVATIONS: dict[str, tuple[list[tuple[str, str, dict[str, Any]]], Callable[[Array], Array]]] = {
    # nodes as (operator, inputs, attributes): s is the sum, y the result
    "none": ([], lambda s: s),
    "relu": ([("Relu", "s -> y", {})], lambda s: np.maximum(s, 0)),
    "gelu": ([("Gelu", "s -> y", {})], lambda s: 0.5 * s * (1 + np.vectorize(math.erf)(s / math.sqrt(2)))),
    "gelu_tanh": (
        [("Gelu", "s -> y", {"approximate": "tanh"})],
        lambda s: 0.5 * s * (1 + np.tanh(math.sqrt(2 / math.pi) * (s + 0.044715 * s**3))),
    ),
    "silu": ([("Sigmoid", "s -> g", {}), ("Mul", "s g -> y", {})], lambda s: s / (1 + np.exp(-s))),
}


def _layer(n: int, layout: str, bias: bool, activation: str, k: int = 40) -> ModelProto:
    """x [batch, seq, k] → a product of n columns, a bias or not, an activation → y; ``table`` [n, k] is looked up too
    where the layout is ``transposed``."""
    after, _ = _ACTIVATIONS[activation]
    total = "s" if after else "y"
    nodes, outputs = [], [graphs.edge("y", ["batch", "seq", n])]
    weight = graphs.values(k, n, seed=1)
    if layout == "transposed":
        nodes.append(helper.make_node("Gather", ["w", "ids"], ["rows"], name="lookup"))
        nodes.append(helper.make_node("Transpose", ["w"], ["t"], name="turn", perm=[1, 0]))
        outputs.append(graphs.edge("rows", ["count", k]))
        weight = np.ascontiguousarray(weight.T)
    right = "t" if layout == "transposed" else "w"
    nodes.append(helper.make_node("MatMul", ["x", right], ["m" if bias else total], name="product"))
    if bias:
        nodes.append(helper.make_node("Add", ["m", "b"], [total], name="add"))
    for op, wires, attributes in after:
        inputs, output = (side.split() for side in wires.split("->"))
        nodes.append(helper.make_node(op, inputs, output, name=op.lower(), **attributes))
    return graphs.model(
        nodes,
        [graphs.edge("x", ["batch", "seq", k]), graphs.edge("ids", ["count"], TensorProto.INT64)],
        outputs,
        [graphs.initializer("w", weight), graphs.initializer("b", graphs.values(n, seed=2))],
    )


def _ours(made: Lowered) -> list[NodeProto]:
    return [node for node in made.graph("cpu").node if node.domain == "bf16kit"]


def _feeds(k: int = 40) -> dict[str, Array]:
    return {"x": graphs.values(2, 3, k, seed=7) * 2, "ids": np.array([1, 0])}


def _with_kernel(made: Lowered, feeds: dict[str, Array]) -> Array:
    if not LIBRARY.exists():
        pytest.skip("the kernel's library is not built: setup.py build_ext --inplace")
    runtime = load(made.artifact, "cpu")
    assert runtime.info.kernel
    return runtime.run(feeds)["y"]


def _without_kernel(made: Lowered, feeds: dict[str, Array], monkeypatch: pytest.MonkeyPatch) -> Array:
    monkeypatch.setenv(VARIABLE, "off")
    return load(made.artifact, "cpu").run(feeds)["y"]


@pytest.mark.parametrize("activation", _ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("layout", "n"), [("panels", 64), ("panels", 50), ("panels", 20), ("transposed", 50)])
def test_every_variant_gives_float64_s_result_with_and_without_the_kernel(
    layout: str, n: int, bias: bool, activation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = lower(tmp_path / "m" / "1", _layer(n, layout, bias, activation))
    assert [node.name for node in _ours(made)] == ["product"]
    weight = made.artifact.tensor("w").astype(np.float64)
    total = _feeds()["x"].astype(np.float64) @ (weight.T if layout == "transposed" else weight)
    expected = _ACTIVATIONS[activation][1](total + (graphs.values(n, seed=2) if bias else 0))
    fallback = _without_kernel(made, _feeds(), monkeypatch)
    np.testing.assert_allclose(fallback, expected, rtol=1e-5, atol=4e-6)
    monkeypatch.delenv(VARIABLE)
    np.testing.assert_allclose(_with_kernel(made, _feeds()), expected, rtol=1e-5, atol=4e-6)


@pytest.mark.parametrize(("layout", "n"), [("panels", 64), ("panels", 50), ("panels", 20), ("transposed", 50)])
def test_a_product_its_bias_and_its_activation_become_one_node(layout: str, n: int, tmp_path: Path) -> None:
    made = lower(tmp_path / "m" / "1", _layer(n, layout, True, "gelu"))
    (node,) = _ours(made)
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


def test_the_graph_is_plain_onnx_that_checks_and_loads_without_us(tmp_path: Path) -> None:
    made = lower(tmp_path / "m" / "1", _layer(50, "panels", True, "silu"))
    path = made.artifact.file("cpu.onnx")
    onnx.checker.check_model(str(path), full_check=True)
    model = onnx.load(path, load_external_data=False)
    assert model.ir_version >= 10
    assert [function.overload for function in model.functions] == ["panels_tail_bias_silu"]
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(["y"], _feeds())[0], made.run_cpu(_feeds())["y"], rtol=1e-5, atol=4e-6)


@pytest.mark.parametrize("opset", [13, 17, 20, 22, 24])
def test_functions_are_written_in_the_operators_of_the_model_s_own_opset(opset: int, tmp_path: Path) -> None:
    for activation in ("gelu", "gelu_tanh"):
        proto = _written_out(activation)
        proto.opset_import[0].version = opset
        target = tmp_path / activation / "1"
        made = lower(target, proto)
        assert [helper.get_attribute_value(a) for n in _ours(made) for a in n.attribute if a.name == "activation"] == [
            activation.encode()
        ]
        onnx.checker.check_model(str(made.artifact.file("cpu.onnx")), full_check=True)
        session = onnxruntime.InferenceSession(str(made.artifact.file("cpu.onnx")), providers=["CPUExecutionProvider"])
        feeds = {"x": graphs.values(3, 16, seed=5)}
        np.testing.assert_allclose(session.run(["y"], feeds)[0], made.run_source(feeds)["y"], atol=2e-2)


def _written_out(activation: str) -> ModelProto:
    """x [batch, 16] → MatMul → Gelu in elementary operators → y."""
    gelu = [
        helper.make_node("Div", ["m", "root2"], ["d"]),
        helper.make_node("Erf", ["d"], ["e"]),
        helper.make_node("Add", ["e", "one"], ["o"]),
    ]
    tanh = [
        helper.make_node("Pow", ["m", "three"], ["p"]),
        helper.make_node("Mul", ["p", "cubic"], ["q"]),
        helper.make_node("Add", ["m", "q"], ["r"]),
        helper.make_node("Mul", ["r", "root"], ["d"]),
        helper.make_node("Tanh", ["d"], ["e"]),
        helper.make_node("Add", ["e", "one"], ["o"]),
    ]
    numbers = {
        "root2": math.sqrt(2),
        "one": 1,
        "half": 0.5,
        "three": 3,
        "cubic": 0.044715,
        "root": math.sqrt(2 / math.pi),
    }
    return graphs.model(
        [
            helper.make_node("MatMul", ["x", "w"], ["m"]),
            *(gelu if activation == "gelu" else tanh),
            helper.make_node("Mul", ["m", "o"], ["half_way"]),
            helper.make_node("Mul", ["half_way", "half"], ["y"]),
        ],
        [graphs.edge("x", ["batch", 16])],
        [graphs.edge("y", ["batch", 32])],
        [
            graphs.initializer("w", graphs.values(16, 32)),
            *(graphs.initializer(name, np.array(value, np.float32)) for name, value in numbers.items()),
        ],
    )


def test_a_variant_is_defined_once_however_many_nodes_use_it(tmp_path: Path) -> None:
    made = lower(tmp_path / "m" / "1", graphs.mlp((32, 64, 64, 32)))
    model = onnx.load(made.artifact.file("cpu.onnx"), load_external_data=False)
    assert [function.overload for function in model.functions] == ["panels_bias_relu", "panels_bias"]
    assert [node.overload for node in _ours(made)] == ["panels_bias_relu", "panels_bias_relu", "panels_bias"]


def test_values_between_the_kernel_s_nodes_keep_name_type_and_shape(tmp_path: Path) -> None:
    """ONNX Runtime cannot infer them for an operator it knows nothing of."""
    made = lower(tmp_path / "m" / "1", graphs.mlp((32, 64, 48)))
    types = {info.name: info.type.tensor_type for info in made.graph("cpu").value_info}
    assert [node.output[0] for node in _ours(made)] == ["h0", "y"]
    assert types["h0"].elem_type == TensorProto.FLOAT
    assert [d.dim_param or d.dim_value for d in types["h0"].shape.dim] == ["batch", 64]


def test_a_bias_of_more_dimensions_is_brought_to_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proto = _layer(50, "panels", True, "none")
    proto.graph.initializer[1].CopyFrom(graphs.initializer("b", graphs.values(50, seed=2).reshape(1, 1, 50)))
    made = lower(tmp_path / "m" / "1", proto)
    assert [(n.op_type, n.domain) for n in made.graph("cpu").node] == [("Reshape", ""), ("MatMul", "bf16kit")]
    fallback = _without_kernel(made, _feeds(), monkeypatch)
    monkeypatch.delenv(VARIABLE)
    np.testing.assert_allclose(fallback, made.run_source(_feeds())["y"], atol=2e-2)
    np.testing.assert_allclose(_with_kernel(made, _feeds()), fallback, rtol=1e-5, atol=4e-6)


def test_a_bias_stored_in_bf16_is_widened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = lower(tmp_path / "m" / "1", _layer(50, "panels", True, "relu"), bf16=["^b$"])
    assert made.ops("cpu") == ["Cast", "MatMul"]
    fallback = _without_kernel(made, _feeds(), monkeypatch)
    monkeypatch.delenv(VARIABLE)
    np.testing.assert_allclose(_with_kernel(made, _feeds()), fallback, rtol=1e-5, atol=4e-6)


def test_every_small_weight_in_bf16_works_too(tmp_path: Path) -> None:
    made = lower(tmp_path / "m" / "1", graphs.mlp((5, 7, 5)), bf16=["."])
    feeds = {"x": graphs.values(4, 5, seed=9)}
    np.testing.assert_allclose(made.run_cpu(feeds)["y"], made.run_source(feeds)["y"], atol=3e-2)


def _product(nodes: Sequence[NodeProto], *more: TensorProto, outputs: Sequence[str] = ("y",)) -> ModelProto:
    """x [4, 16] · w [16, 32] is ``m``; ``b`` is a bias."""
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
        pytest.param(_product([_ADD, _RELU]), ["bf16kit.MatMul"], id="bias on the left"),
        pytest.param(
            _product([_ADD, _RELU], outputs=("y", "m")), ["bf16kit.MatMul", "Add", "Relu"], id="product is an output"
        ),
        pytest.param(_product([_ADD, _RELU], outputs=("y", "s")), ["bf16kit.MatMul", "Relu"], id="sum is an output"),
        pytest.param(
            _product([helper.make_node("Add", ["m", "m"], ["s"]), _RELU]),
            ["bf16kit.MatMul", "Add", "Relu"],
            id="added to itself",
        ),
        pytest.param(
            _product(
                [helper.make_node("Add", ["m", "column"], ["s"]), _RELU],
                graphs.initializer("column", graphs.values(4, 1)),
            ),
            ["bf16kit.MatMul", "Add", "Relu"],
            id="one number per row",
        ),
        pytest.param(
            _product(
                [helper.make_node("Add", ["m", "high"], ["s"]), _RELU],
                graphs.initializer("high", graphs.values(1, 1, 32)),
            ),
            ["bf16kit.MatMul", "Add", "Relu"],
            id="a sum of more dimensions",
        ),
        pytest.param(
            _product([helper.make_node("Sum", ["m", "b"], ["s"]), _RELU]),
            ["bf16kit.MatMul", "Sum", "Relu"],
            id="not an Add",
        ),
    ],
)
def test_only_what_follows_a_product_alone_is_taken_along(proto: ModelProto, ops: list[str], tmp_path: Path) -> None:
    made = lower(tmp_path / "m" / "1", proto)
    found = [f"{node.domain}.{node.op_type}".lstrip(".") for node in made.graph("cpu").node]
    assert found == ops
    feeds = {"x": graphs.values(4, 16, seed=9)}
    for name, array in made.run_source(feeds).items():
        np.testing.assert_allclose(made.run_cpu(feeds)[name], array, atol=3e-2)


def test_what_a_body_reads_too_stays_outside_the_kernel(tmp_path: Path) -> None:
    """The sum is captured by both branches of an If: nobody could give it to them."""
    proto = graphs.if_branches(32)
    head = [helper.make_node("MatMul", ["x0", "w"], ["x"], name="product"), helper.make_node("Relu", ["x"], ["r"])]
    nodes = [*head, *proto.graph.node]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    proto.graph.input[0].CopyFrom(graphs.edge("x0", ["batch", 16]))
    proto.graph.output.append(graphs.edge("r", ["batch", 32]))
    proto.graph.initializer.append(graphs.initializer("w", graphs.values(16, 32, seed=4)))
    made = lower(tmp_path / "m" / "1", proto)
    assert [node.output[0] for node in _ours(made)] == ["x"]
    assert "Relu" in made.ops("cpu")


def test_a_vector_of_activations_is_multiplied_too(tmp_path: Path) -> None:
    proto = graphs.model(
        [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Add", ["m", "b"], ["y"])],
        [graphs.edge("x", [16])],
        [graphs.edge("y", [48])],
        [graphs.initializer("w", graphs.values(16, 48)), graphs.initializer("b", graphs.values(48))],
    )
    made = lower(tmp_path / "m" / "1", proto)
    assert made.ops("cpu") == ["MatMul"]
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
    assert [node.overload for node in _ours(made)] == ["panels_tail_bias" if bias else "panels_tail"]
    feeds = {"x": graphs.values(4, 16, seed=3)}
    np.testing.assert_allclose(made.run_cpu(feeds)["y"], made.run_source(feeds)["y"], atol=2e-2)


def _excitation(pixels: int = 1) -> ModelProto:
    """x [batch, 64, pixels, pixels] → Conv 1×1 to 32 channels, Relu → Conv 1×1 to 64 → y, as squeeze-and-excite has."""
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


def test_a_convolution_of_a_single_pixel_is_a_product(tmp_path: Path) -> None:
    made = lower(tmp_path / "m" / "1", _excitation())
    assert [node.overload for node in _ours(made)] == ["transposed_bias_relu", "transposed"]
    assert "Conv" not in made.ops("cpu")
    feeds = {"x": graphs.values(3, 64, 1, 1, seed=3)}
    source = made.run_source(feeds)["y"]
    assert source.shape == (3, 64, 1, 1)
    np.testing.assert_allclose(made.run_cpu(feeds)["y"], source, rtol=2e-2, atol=1e-1)
    np.testing.assert_array_equal(made.run_reference(feeds)["y"], source)


def test_a_convolution_of_more_pixels_is_left_alone(tmp_path: Path) -> None:
    assert _ours(lower(tmp_path / "m" / "1", _excitation(pixels=2))) == []


def test_a_weight_that_nothing_but_the_kernel_may_read_is_guarded() -> None:
    model = run([InferTypes()], ir.from_proto(graphs.mlp((16, 32))))
    with pytest.raises(ConversionError, match=r"node 'matmul0' reads 'w0', which is stored in panels"):
        run([UseKernel(set(), {"w0"})], model)
