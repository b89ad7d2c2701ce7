"""Products that round their activations to bf16, in the kernel and in their definitions in ONNX operators."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from layers import ACTIVATIONS, Array, batch, layer
from lowered import Lowered, lower
from onnx import ModelProto, helper
from onnx.reference import ReferenceEvaluator

import graphs
from bf16kit.numerics.rounding import to_bf16, to_fp32
from bf16kit.runtime.loading import load
from bf16kit.runtime.ort.kernel import LIBRARY, VARIABLE
from bf16kit.runtime.ort.session import open_session
from converter.plan.decisions import Islands

PROFILE = "cpu-bf16"


def _lower(target: Path, proto: ModelProto) -> Lowered:
    return lower(target, proto, profiles=["cpu", PROFILE])


def _file(made: Lowered) -> Path:
    return made.artifact.file(f"{PROFILE}.onnx")


def _names(made: Lowered) -> list[str]:
    return [node.op_type for node in made.graph(PROFILE).node if node.domain == "bf16kit"]


def _rounded(array: Array) -> Array:
    return to_fp32(to_bf16(array.astype(np.float32))).astype(np.float64)


def _optimised(made: Lowered, tmp_path: Path) -> onnx.GraphProto:
    """Return the graph as ONNX Runtime runs it without the kernel's library, after all its optimisations."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    onnxruntime.InferenceSession(str(_file(made)), options, providers=["CPUExecutionProvider"])
    return onnx.load(tmp_path / "optimised.onnx", load_external_data=False).graph


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("layout", "n"), [("panels", 64), ("panels", 50), ("panels", 20), ("transposed", 50)])
def test_every_variant_rounds_its_activations_and_nothing_else(
    layout: str, n: int, bias: bool, activation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    made = _lower(tmp_path / "m" / "1", layer(n, layout, bias=bias, activation=activation))
    (name,) = _names(made)
    assert name.startswith("MatMulBf16_")
    assert name.replace("Bf16", "") in made.ops("cpu")
    onnx.checker.check_model(str(_file(made)), full_check=True)
    weight = made.artifact.tensor("w").astype(np.float64)
    total = _rounded(batch()["x"]) @ (weight.T if layout == "transposed" else weight)
    expected = ACTIVATIONS[activation][1](total + (graphs.values(n, seed=2) if bias else 0))
    given = load(made.artifact, PROFILE).run(batch())["y"]
    np.testing.assert_allclose(given, expected, rtol=1e-5, atol=4e-6)
    if "gelu" not in activation:  # onnx 1.23's evaluator does not find Gelu inside functions
        evaluated = ReferenceEvaluator(onnx.load(_file(made))).run(["y"], batch())
        assert isinstance(evaluated, list)
        np.testing.assert_allclose(evaluated[0], expected, rtol=1e-5, atol=4e-6)
    assert np.abs(given - load(made.artifact, "cpu").run(batch())["y"]).max() > 1e-4  # the cpu profile rounds nothing


@pytest.mark.skipif(not LIBRARY.exists(), reason="the kernel was not built: no C++17 compiler")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("layout", "n"), [("panels", 64), ("panels", 50), ("panels", 20), ("transposed", 50)])
def test_the_kernel_has_every_variant_and_gives_its_definition_s_outputs(
    layout: str, n: int, activation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = _lower(tmp_path / "m" / "1", layer(n, layout, bias=True, activation=activation))
    alone = onnx.load(_file(made), load_external_data=False)
    del alone.functions[:]  # otherwise they would run in place of an operator that is missing
    open_session(alone.SerializeToString(), base_dir=_file(made).parent, library=LIBRARY)
    found = load(made.artifact, PROFILE)
    assert (found.info.precision, found.info.accumulation) == ("bf16", "fp32")
    assert found.info.kernel
    answer = found.run(batch())["y"]
    monkeypatch.setenv(VARIABLE, "off")
    np.testing.assert_allclose(answer, load(made.artifact, PROFILE).run(batch())["y"], rtol=1e-5, atol=4e-6)


def _before(graph: onnx.GraphProto) -> Sequence[list[str]]:
    """Return, for each product, the dtypes that the casts right before it cast to, the nearest last."""
    given = {name: node for node in graph.node for name in node.output}
    found = []
    for product in (node for node in graph.node if "MatMul" in node.op_type or "Gemm" in node.op_type):
        casts: list[str] = []
        node = given.get(product.input[0])
        while node is not None and node.op_type == "Cast":
            casts.insert(0, onnx.TensorProto.DataType.Name(helper.get_node_attr_value(node, "to")))
            node = given.get(node.input[0])
        found.append(casts)
    return found


def test_no_optimisation_of_onnx_runtime_removes_the_rounding(tmp_path: Path) -> None:
    """An optimiser that only looks at types could remove a cast to bf16 and back, after an input or a product."""
    made = _lower(tmp_path / "m" / "1", graphs.mlp((32, 64, 64, 50)))
    found = [casts[-2:] for casts in _before(_optimised(made, tmp_path))]
    assert found == [["BFLOAT16", "FLOAT"]] * len(_names(made))
    assert found


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("count", [2, 3])
def test_products_of_the_same_activations_are_rounded_once(
    count: int, bias: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    weights = [graphs.initializer(f"w{i}", graphs.values(40, 32, seed=i)) for i in range(count)]
    nodes = [
        helper.make_node("MatMul", ["x", f"w{i}"], [f"m{i}" if bias else f"y{i}"], name=f"p{i}") for i in range(count)
    ]
    if bias:
        nodes += [helper.make_node("Add", [f"m{i}", f"b{i}"], [f"y{i}"], name=f"a{i}") for i in range(count)]
        weights += [graphs.initializer(f"b{i}", graphs.values(32, seed=9 + i)) for i in range(count)]
    outputs = [graphs.edge(f"y{i}", ["batch", "seq", 32]) for i in range(count)]
    made = _lower(tmp_path / "m" / "1", graphs.model(nodes, [graphs.edge("x", ["batch", "seq", 40])], outputs, weights))
    assert _names(made) == [f"MatMul{count}Bf16_panels{'_bias' if bias else ''}"]
    x = batch()["x"]
    answers = load(made.artifact, PROFILE).run({"x": x})
    for i in range(count):
        expected = _rounded(x) @ made.artifact.tensor(f"w{i}").astype(np.float64)
        expected += graphs.values(32, seed=9 + i) if bias else 0
        np.testing.assert_allclose(answers[f"y{i}"], expected, rtol=1e-5, atol=4e-6)


def test_a_product_that_is_kept_in_fp32_is_not_joined_with_those_that_round(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", f"w{i}"], [f"y{i}"], name=f"p{i}") for i in range(3)]
    weights = [graphs.initializer(f"w{i}", graphs.values(40, 32, seed=i)) for i in range(3)]
    outputs = [graphs.edge(f"y{i}", ["batch", 32]) for i in range(3)]
    source = graphs.model(nodes, [graphs.edge("x", ["batch", 40])], outputs, weights)
    made = lower(tmp_path / "m" / "1", source, profiles=["cpu-bf16"], islands=Islands(nodes={"p1": "why"}))
    assert sorted(_names(made)) == ["MatMul2Bf16_panels", "MatMul_panels"]
