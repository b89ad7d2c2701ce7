"""Errors of ``bf16kit::MatMul``, at load or at run time: clear messages, no crash, no read past the end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import products
import pytest
from onnx import TensorProto
from products import LAYOUTS, product, run, session

import graphs
from bf16kit.messages.errors import RuntimeFailure
from bf16kit.runtime.ort import kernel
from bf16kit.runtime.ort.session import as_runtime_failure, open_session

pytestmark = pytest.mark.skipif(not kernel.LIBRARY.exists(), reason="the kernel was not built: no C++17 compiler")
K, N = 300, 72


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kernel.VARIABLE, raising=False)


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"k": 0}, "attribute k is 0; it must be between 1"),
        ({"n": 0}, "attribute n is 0; it must be between 1"),
        ({"k": -3}, "attribute k is -3"),
        ({"n": 2**40}, f"attribute n is {2**40}; it must be between 1 and {2**31 - 1}"),
        ({"layout": "tiles"}, 'attribute layout is "tiles"; it must be one of: panels, transposed'),
        ({"activation": "tanh"}, 'attribute activation is "tanh"; it must be one of: none, relu, gelu, gelu_tanh'),
        ({"activation": "x" * 1000}, r"attribute activation is \"\(a longer text\)\""),
        ({"layout": ""}, "attribute layout is"),
        ({"k": "four"}, "attribute k is missing or of another type; it must be an integer"),
        ({"layout": 1}, "attribute layout is missing or of another type; it must be a string"),
        ({"n": N + 1}, f"the weight, input 1, has {K * N} elements; k = {K} and n = {N + 1} need {K * (N + 1)}"),
    ],
    ids=str,
)
def test_a_wrong_attribute_is_rejected_at_load(attributes: dict[str, Any], words: str) -> None:
    with pytest.raises(RuntimeFailure, match=words):
        session(product(graphs.values(K, N), function=False, **attributes))


@pytest.mark.parametrize("name", ["k", "n", "layout", "activation"])
def test_a_missing_attribute_is_rejected_at_load(name: str) -> None:
    model = product(graphs.values(K, N), function=False)
    (node,) = model.graph.node
    kept = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend(kept)
    with pytest.raises(RuntimeFailure, match=name):
        session(model)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("elements", [0, 1, K * N - 1, K * N + 1])
def test_a_weight_of_the_wrong_size_is_rejected_at_load(layout: str, elements: int) -> None:
    """The weight was truncated or made for another layer. It must not be read past its end."""
    stored = np.zeros(elements, ml_dtypes.bfloat16)
    words = f"the weight, input 1, has {elements} elements; k = {K} and n = {N} need {K * N}"
    with pytest.raises(RuntimeFailure, match=words):
        session(product(graphs.values(K, N), layout=layout, stored=stored, function=False))


def test_a_weight_of_another_dtype_is_rejected_at_load() -> None:
    for dtype in (np.float32, np.uint16):
        with pytest.raises(RuntimeFailure, match="cannot load"):
            session(product(graphs.values(K, N), stored=np.zeros(K * N, dtype), function=False))


def test_a_weight_that_is_computed_is_rejected_at_load() -> None:
    model = products.with_computed_weight(product(graphs.values(K, N), function=False))
    with pytest.raises(RuntimeFailure, match="input 1, a weight, is computed; it must be a constant of the graph"):
        session(model)


def test_a_weight_at_an_odd_offset_is_rejected_or_read_correctly(tmp_path: Path) -> None:
    """ONNX Runtime maps the file at any offset that the graph names."""
    weight, x = graphs.values(K, N), graphs.values(2, K, seed=2)
    model = product(weight, function=False)
    expected = run(model, x)
    (tensor,) = model.graph.initializer
    data = tensor.raw_data
    (tmp_path / "weights.bf16").write_bytes(b"?" + data)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": "weights.bf16", "offset": "1", "length": str(len(data))}.items():
        tensor.external_data.add(key=key, value=value)
    path = tmp_path / "cpu.onnx"
    path.write_bytes(model.SerializeToString())
    try:
        opened = open_session(path, threads=1, library=kernel.LIBRARY)
    except RuntimeFailure as error:
        assert "odd" in str(error)  # noqa: PT017 - both are correct, depending on how ONNX Runtime reads the file
    else:
        assert np.array_equal(opened.run(["y"], {"x": x})[0], expected)


@pytest.mark.parametrize("width", [1, K - 1, K + 1, 2 * K, 0])
def test_x_of_the_wrong_width_is_rejected_at_run_time(width: int) -> None:
    model = product(graphs.values(K, N), x=["rows", "width"], function=False)
    with pytest.raises(RuntimeFailure, match=f"the last dimension of x is {width}; the weight has k = {K} rows"):
        run(model, np.zeros((2, width), np.float32))


def test_a_scalar_x_is_rejected_at_run_time() -> None:
    model = product(graphs.values(1, N), function=False)
    model.graph.input[0].CopyFrom(graphs.edge("x"))  # any shape
    model.graph.output[0].CopyFrom(graphs.edge("y"))
    with pytest.raises(RuntimeFailure, match="x is a scalar; it must have at least one dimension"):
        run(model, np.array(1, np.float32))


@pytest.mark.parametrize("shape", [(N - 1,), (N + 1,), (1, N), (0,), (1,), ()], ids=str)
def test_a_bias_of_another_shape_is_rejected_at_load(shape: Sequence[int]) -> None:
    model = product(graphs.values(K, N), np.zeros(shape, np.float32), function=False)
    with pytest.raises(RuntimeFailure, match=rf"the bias has {len(shape)} dimensions .* it must be \[n\] with n = {N}"):
        session(model)


def test_a_computed_bias_of_the_wrong_shape_is_rejected_at_run_time() -> None:
    model = product(graphs.values(K, N), np.zeros(N, np.float32), function=False)
    model.graph.input.append(graphs.edge("b", ["length"]))
    del model.graph.initializer[1]
    opened = session(model)
    with (
        pytest.raises(RuntimeFailure, match=rf"the bias has 1 dimensions and {N - 1} elements; it must be \[n\]"),
        as_runtime_failure("the run"),
    ):
        opened.run(["y"], {"x": np.zeros((2, K), np.float32), "b": np.zeros(N - 1, np.float32)})


def test_a_node_with_too_few_or_too_many_inputs_is_rejected_at_load() -> None:
    for inputs in (["x"], ["x", "w", "", "w"]):
        model = product(graphs.values(K, N), function=False)
        del model.graph.node[0].input[:]
        model.graph.node[0].input.extend(inputs)
        with pytest.raises(RuntimeFailure, match="cannot load"):
            session(model)


def test_another_operator_of_our_domain_is_rejected_at_load() -> None:
    model = product(graphs.values(K, N), function=False)
    model.graph.node[0].op_type = "Conv"
    with pytest.raises(RuntimeFailure, match="Conv"):
        session(model)
