"""Products by bf16 weights become the kernel's, with bias and activation; their weights are stored in panels."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from layers import ACTIVATIONS, K, answers, batch, layer, ours
from lowered import Array, Lowered, lower
from onnx import ModelProto, TensorProto, helper

import graphs
from bf16kit.converter.fuse.functions import Fusing
from bf16kit.converter.fuse.products import panelled_weights, product
from bf16kit.converter.graph.types import infer_types, run
from bf16kit.numerics.rounding import to_bf16, to_fp32
from bf16kit.runtime.ort.session import ort

ROUNDING = "cpu-bf16"
FORMS = {("panels", 64): "panels", ("panels", 50): "panels_tail", ("panels", 20): "panels_narrow"}
FORMS |= {("transposed", 50): "transposed"}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("layout", "n"), FORMS)
def test_every_variant_gives_float64_s_result_with_and_without_the_kernel(
    layout: str, n: int, bias: bool, activation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = lower(tmp_path / "m" / "1", layer(n, layout, bias=bias, activation=activation), profiles=["cpu", ROUNDING])
    weight = made.artifact.tensor("w").astype(np.float64)
    suffix = f"{FORMS[layout, n]}{'_bias' * bias}{f'_{activation}' * (activation != 'none')}"
    by_profile = {}
    for profile, stem in (("cpu", "MatMul"), (ROUNDING, "MatMulBf16")):
        (node,) = ours(made, profile)
        assert (node.name, node.op_type, [*node.output]) == ("product", f"{stem}_{suffix}", ["y"])
        assert [*node.input] == ["x", "w", *(["b"] if bias else [])]
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        expected = {"k": K, "n": n, "layout": layout.encode(), "activation": activation.encode()}
        assert attributes | expected == attributes
        onnx.checker.check_model(str(made.artifact.file(f"{profile}.onnx")), full_check=True)
        x = to_fp32(to_bf16(batch()["x"])) if profile == ROUNDING else batch()["x"]
        total = x.astype(np.float64) @ (weight.T if layout == "transposed" else weight)
        right = ACTIVATIONS[activation][1](total + (graphs.values(n, seed=2) if bias else 0))
        found = [each["y"] for each in answers(made, batch(), monkeypatch, profile)]
        for answer in found:
            np.testing.assert_allclose(answer, right, rtol=1e-5, atol=4e-6)
        by_profile[profile] = found[0]
    assert np.abs(by_profile["cpu"] - by_profile[ROUNDING]).max() > 1e-4  # the cpu profile rounds nothing
    (stored,) = [tensor for tensor in made.graph("cpu").initializer if tensor.name == "w"]
    assert (stored.data_type, [*stored.dims]) == (TensorProto.BFLOAT16, [n, K] if layout == "transposed" else [K * n])


def test_a_product_of_16_columns_is_left_to_onnx_runtime_which_is_faster_there(tmp_path: Path) -> None:
    for n in (16, 17):
        written = layer(n, "panels", bias=True, activation="none")
        made = lower(tmp_path / str(n) / "1", written, profiles=["cpu", ROUNDING])
        for profile in ("cpu", ROUNDING):
            assert len(ours(made, profile)) == (n > 16)


@pytest.mark.parametrize("opset", [13, 17, 20, 22, 24])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_the_graph_is_plain_onnx_of_the_model_s_own_opset(activation: str, opset: int, tmp_path: Path) -> None:
    proto = _model((_ERF if activation == "gelu" else _TANH)[0], opset=opset)
    made = lower(tmp_path / "m" / "1", proto)
    path = str(made.artifact.file("cpu.onnx"))
    onnx.checker.check_model(path, full_check=True)
    assert onnx.load(path).ir_version >= 8
    assert [function.name for function in onnx.load(path).functions] == [f"MatMul_panels_{activation}"]
    feeds = {"x": graphs.values(3, 16, seed=5)}
    plain = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(["y"], feeds)[0]
    np.testing.assert_allclose(plain, made.run_cpu(feeds)["y"], rtol=1e-5, atol=4e-6)
    np.testing.assert_allclose(plain, made.run_source(feeds)["y"], atol=2e-2)


def test_no_optimisation_of_onnx_runtime_removes_the_rounding(tmp_path: Path) -> None:
    """An optimiser that only looks at types could remove the cast to bf16 and back before each product."""
    made = lower(tmp_path / "m" / "1", graphs.mlp((32, 64, 64, 50)), profiles=[ROUNDING])
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    ort.InferenceSession(str(made.artifact.file(f"{ROUNDING}.onnx")), options, providers=["CPUExecutionProvider"])
    optimised = onnx.load(tmp_path / "optimised.onnx", load_external_data=False).graph
    casts = {node.output[0]: node for node in optimised.node if node.op_type == "Cast"}
    read = [casts[node.input[0]] for node in optimised.node if "MatMul" in node.op_type or "Gemm" in node.op_type]
    rounded = [helper.get_node_attr_value(casts[cast.input[0]], "to") for cast in read]
    assert rounded == [TensorProto.BFLOAT16] * 3


# --- what follows a product -------------------------------------------------------------------------------------------

_ROOT, _INVERSE, _SCALE = math.sqrt(2), math.sqrt(0.5), math.sqrt(2 / math.pi)
# What exporters write, with semicolons between nodes: ``m`` is the product, ``y`` the result, numbers are constants.
_ERF = (
    f"Div m {_ROOT} a; Erf a b; Add b 1 c; Mul m c d; Mul d 0.5 y",  # torch's TorchScript exporter
    f"Mul m {_INVERSE} a; Erf a b; Add b 1 c; Mul m 0.5 d; Mul d c y",  # torch's decomposition
    f"Mul 0.5 m d; Mul m {_INVERSE} a; Erf a b; Add 1 b c; Mul c d y",
    f"Div m {_ROOT} a; Erf a b; Add b 1 c; Mul c 0.5 d; Mul m d y",
    f"Mul m {_INVERSE} a; Erf a b; Mul 0.5 b c; Add c 0.5 d; Mul m d y",
    "Gelu m y",
)
_TANH = (
    f"Pow m 3 a; Mul a 0.044715 b; Add m b c; Mul c {_SCALE} d; Tanh d e; Add e 1 f; Mul m 0.5 g; Mul g f y",
    f"Mul m m a; Mul a m b; Mul 0.044715 b c; Add m c d; Mul {_SCALE} d e; Tanh e f; Add 1 f g; Mul m g h; Mul 0.5 h y",
    f"Mul m m a; Mul a 0.044715 b; Add b 1 c; Mul m {_SCALE} d; Mul d c e; Tanh e f; Add f 1 g; Mul m 0.5 h; Mul h g y",
    "Gelu m y approximate=tanh",
)
_OTHERS = (
    "Mul m 1.702 a; Sigmoid a b; Mul m b y",  # Gelu's sigmoid form
    f"Div m {_ROOT} a; Erf a b; Add b 1 c; Mul m c y",  # Gelu twice as large
    f"Mul m {_INVERSE * 1.001} a; Erf a b; Add b 1 c; Mul m 0.5 d; Mul d c y",  # off by 0.1 %
    "Tanh m y",
    "Elu m y",
    "Mul m 2 a; Relu a y",
    "Sigmoid m a; Mul a a y",  # not the product again
    "Relu m a; Sub m 2000 b; Relu b c; Sub a c y",  # Relu with a bound that no sample reaches
    "Relu m y; Neg m z",  # from here on, others read an inner value
    "Sigmoid m a; Mul m a y; Neg a z",
)
_WRITTEN = [
    *(("gelu", way) for way in _ERF),
    *(("gelu_tanh", way) for way in _TANH),
    *(("silu", way) for way in ("Sigmoid m a; Mul m a y", "Sigmoid m a; Mul a m y")),
    ("relu", "Relu m y"),
    *(("none", way) for way in _OTHERS),
]


def _model(written: str, *more: TensorProto, outputs: Sequence[str] = (), opset: int = graphs.OPSET) -> ModelProto:
    """Return a graph where ``m`` is x [batch, 16] · w [16, 32], and the nodes in ``written`` follow.

    Outputs are the ``outputs``, or y and z. Numbers in ``written`` and ``more`` are initializers.
    """
    nodes, constants = [helper.make_node("MatMul", ["x", "w"], ["m"], name="product")], dict[str, TensorProto]()
    for line in written.split(";"):
        words = [word for word in line.split() if "=" not in word]
        attributes = dict(word.split("=") for word in line.split() if "=" in word)
        op, *inputs, output = words
        for word in inputs:
            if word[0].isdigit():
                constants[word] = graphs.initializer(word, np.array(float(word), np.float32))
        nodes.append(helper.make_node(op, inputs, [output], name=output, **attributes))
    given = outputs or [name for name in ("y", "z") if name in {node.output[0] for node in nodes}]
    weights = [graphs.initializer("w", graphs.values(16, 32)), *constants.values(), *more]
    proto = graphs.model(nodes, [graphs.edge("x", ["batch", 16])], [graphs.edge(name) for name in given], weights)
    proto.opset_import[0].version = opset
    return proto


@pytest.mark.parametrize(("activation", "written"), _WRITTEN)
def test_an_activation_is_fused_however_it_is_written_and_nothing_else(
    activation: str, written: str, tmp_path: Path
) -> None:
    made = lower(tmp_path / "m" / "1", _model(written), profiles=["cpu"])
    assert [node.op_type for node in ours(made)] == [f"MatMul_panels{f'_{activation}' * (activation != 'none')}"]
    assert len(made.ops("cpu")) == (1 if activation != "none" else 1 + len(written.split(";")))


_BIAS = graphs.initializer("b", graphs.values(32, seed=1))
_COLUMN, _HIGH = graphs.initializer("c", graphs.values(4, 1)), graphs.initializer("h", graphs.values(1, 1, 32))


@pytest.mark.parametrize(
    ("proto", "ops"),
    [
        pytest.param(_model("Add b m s; Relu s y", _BIAS), ["kernel"], id="bias on the left"),
        pytest.param(
            _model("Add b m s; Relu s y", _BIAS, outputs="ym"), ["kernel", "Add", "Relu"], id="product is an output"
        ),
        pytest.param(_model("Add b m s; Relu s y", _BIAS, outputs="ys"), ["kernel", "Relu"], id="sum is an output"),
        pytest.param(_model("Add m m s; Relu s y"), ["kernel", "Add", "Relu"], id="added to itself"),
        pytest.param(_model("Add m c s; Relu s y", _COLUMN), ["kernel", "Add", "Relu"], id="one number per row"),
        pytest.param(_model("Add m h s; Relu s y", _HIGH), ["kernel", "Add", "Relu"], id="a sum of more dimensions"),
        pytest.param(_model("Sum m b s; Relu s y", _BIAS), ["kernel", "Sum", "Relu"], id="not an Add"),
    ],
)
def test_only_a_plain_bias_and_the_activation_after_it_are_fused(
    proto: ModelProto, ops: list[str], tmp_path: Path
) -> None:
    made = lower(tmp_path / "m" / "1", proto)
    found = ["kernel" if node.domain == "bf16kit" else node.op_type for node in made.graph("cpu").node]
    assert found == ops
    _assert_same(made, {"x": graphs.values(4, 16, seed=9)})


def _assert_same(made: Lowered, feeds: dict[str, Array], tolerance: float = 3e-2) -> None:
    for name, array in made.run_source(feeds).items():
        np.testing.assert_allclose(made.run_cpu(feeds)[name], array, rtol=1e-2, atol=tolerance)


def test_an_activation_is_not_fused_if_a_body_also_reads_the_product(tmp_path: Path) -> None:
    """Both branches of an If capture the product, which a fused node would not return."""
    proto = graphs.parsed(
        """(float[batch, 16] x, bool flag) => (float[batch, 32] y, float[batch, 32] r) {
            [product] m = MatMul (x, w) r = Relu (m)
            y = If (flag) <
                then_branch = then_graph () => (float[batch, 32] t) { t = Neg (m) },
                else_branch = other_graph () => (float[batch, 32] o) { o = Identity (m) }
            >
        }""",
        w=graphs.values(16, 32, seed=4),
    )
    made = lower(tmp_path / "m" / "1", proto)
    assert [node.output[0] for node in ours(made)] == ["m"]
    assert "Relu" in made.ops("cpu")


@pytest.mark.parametrize("activation", ["Relu", "Abs"])
def test_a_reshape_between_a_product_and_its_activation_moves_after_both(activation: str, tmp_path: Path) -> None:
    """In GPT-2, layers multiply matrices, but apply activations to batches of them."""
    split = graphs.initializer("split", np.array([-1, 2, 32]))
    made = lower(tmp_path / "m" / "1", _model(f"Reshape m split s; {activation} s y", split))
    fused = [("MatMul_panels_relu", "product/product"), ("Reshape", "y")]
    apart = [("MatMul_panels", "m"), ("Reshape", "s"), ("Abs", "y")]
    found = [(node.op_type, *node.output) for node in made.graph("cpu").node]
    assert found == (fused if activation == "Relu" else apart)
    _assert_same(made, {"x": graphs.values(4, 16, seed=3)})


def test_a_product_of_a_vector_is_replaced(tmp_path: Path) -> None:
    proto = _model("Add m b y", _BIAS)
    proto.graph.input[0].CopyFrom(graphs.edge("x", [16]))
    made = lower(tmp_path / "m" / "1", proto)
    assert made.ops("cpu") == ["MatMul_panels_bias"]
    _assert_same(made, {"x": graphs.values(16, seed=3)})


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_gemm_is_a_product_with_its_bias(transposed: bool, bias: bool, tmp_path: Path) -> None:
    weight, given = graphs.values(16, 48), "x, w, b" if bias else "x, w"
    proto = graphs.parsed(
        f"(float[batch, 16] x) => (float[batch, 48] y) {{ y = Gemm <transB = {int(transposed)}> ({given}) }}",
        w=np.ascontiguousarray(weight.T) if transposed else weight,
        b=graphs.values(48),
    )
    made = lower(tmp_path / "m" / "1", proto)
    assert [node.op_type for node in ours(made)] == [f"MatMul_panels_tail{'_bias' * bias}"]
    _assert_same(made, {"x": graphs.values(4, 16, seed=3)})


def test_a_convolution_of_a_single_pixel_becomes_a_product(tmp_path: Path) -> None:
    """As in a squeeze-and-excite."""
    proto = graphs.parsed(
        """(float[batch, 64, 1, 1] x) => (float[batch, 64, 1, 1] y) {
            [reduce] c = Conv (x, w, b) [relu] r = Relu (c) [expand] y = Conv <auto_pad = "SAME_UPPER"> (r, v)
        }""",
        w=graphs.values(32, 64, 1, 1),
        b=graphs.values(32),
        v=graphs.values(64, 32, 1, 1, seed=1),
    )
    made = lower(tmp_path / "m" / "1", proto)
    assert [node.op_type for node in ours(made)] == ["MatMul_transposed_bias_relu", "MatMul_transposed"]
    assert "Conv" not in made.ops("cpu")
    feeds = {"x": graphs.values(3, 64, 1, 1, seed=3)}
    assert made.run_cpu(feeds)["y"].shape == (3, 64, 1, 1)
    _assert_same(made, feeds, 1e-1)
    np.testing.assert_array_equal(made.run_reference(feeds)["y"], made.run_source(feeds)["y"])


def test_a_convolution_of_several_pixels_stays(tmp_path: Path) -> None:
    text = "(float[batch, 64, 4, 1] x) => (float[batch, 32, 4, 1] y) { [conv] y = Conv (x, w) }"
    made = lower(tmp_path / "m" / "1", graphs.parsed(text, w=graphs.values(32, 64, 1, 1)))
    assert ours(made) == []
    assert "Conv" in made.ops("cpu")


# --- what is stored in panels -----------------------------------------------------------------------------------------

# Nodes that read ``w``, its shape, and the axis of its panels; None if it keeps its rows.
_GEMM = "y = Gemm <transB = 1> (x, w)"
_BODIES = """flags = Cast <to = 9> (ids) flag = ReduceMax <keepdims = 0> (flags) z = If (flag) <
    then_branch = then_graph () => (float[batch, 32] t) { t = Gather (w, ids) },
    else_branch = other_graph () => (float[batch, 32] o) { o = Gather (w, ids) }
>"""
STORED: dict[str, tuple[str, tuple[int, int], int | None]] = {
    "Gemm": ("y = Gemm (x, w)", (32, 48), 1),
    "Gemm, a row": ("y = Gemm (x, w, row)", (32, 48), 1),
    "Gemm, a row, transposed": ("y = Gemm <transB = 1> (x, w, row)", (48, 32), 0),
    "Gemm, a wide row": ("y = Gemm (x, w, wide)", (32, 48), None),
    "alpha": ("y = Gemm <alpha = 0.5> (x, w)", (32, 48), None),
    "beta": ("y = Gemm <beta = 0.5> (x, w, row)", (32, 48), None),
    "a scalar is added": ("y = Gemm (x, w, scalar)", (32, 48), None),
    "a column is added": ("y = Gemm (x, w, column)", (32, 48), None),
    "two products": ("y = Gemm (x, w) a = MatMul (x, w)", (32, 48), 1),
    "transposed for a product": ("t = Transpose <perm = [1, 0]> (w) y = MatMul (x, t)", (48, 32), 0),
    "looked up": ("r = Gather (w, ids) t = Transpose <perm = [1, 0]> (w) y = MatMul (x, t)", (48, 32), 0),
    "looked up, axis -2": (f"{_GEMM} z = Gather <axis = -2> (w, ids)", (48, 32), 0),
    "columns looked up": (f"{_GEMM} z = Gather <axis = 1> (w, ids)", (48, 32), None),
    "GatherND": (f"{_GEMM} z = GatherND (w, ids)", (48, 32), None),
    "Neg": (f"{_GEMM} z = Neg (w)", (48, 32), None),
    "Transpose": (f"{_GEMM} t = Transpose (w) z = Abs (t)", (48, 32), None),
    "a body looks it up": (f"{_GEMM} {_BODIES}", (48, 32), None),
}


@pytest.mark.parametrize("name", STORED)
def test_a_weight_is_stored_in_panels_if_only_the_kernel_reads_it(name: str) -> None:
    nodes, shape, axis = STORED[name]
    proto = graphs.parsed(
        f"(float[batch, 32] x, int64[batch] ids) => (float[batch, 48] y) {{ {nodes} }}",
        w=graphs.values(*shape),
        row=graphs.values(48),
        wide=graphs.values(1, 48),
        scalar=np.array(0.5, np.float32),
        column=graphs.values(7, 1),
    )
    model = run([infer_types], ir.from_proto(proto))
    assert panelled_weights(Fusing(model, {"w"})) == ({} if axis is None else {"w": axis})
    assert panelled_weights(Fusing(model)) == {}
    if axis is None and shape == (48, 32):  # the kernel still reads its rows
        (found,) = [each for node in model.graph if (each := product(node, {"w"})) is not None]
        assert found.layout({}) == "transposed"


def test_a_weight_that_a_body_multiplies_keeps_its_rows() -> None:
    proto = graphs.if_branches()
    proto.graph.node.append(helper.make_node("MatMul", ["x", "captured"], ["z"]))
    model = run([infer_types], ir.from_proto(proto))
    assert panelled_weights(Fusing(model, {"captured"})) == {}
