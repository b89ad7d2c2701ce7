"""Errors of the kernel's operators, at load or at run time: clear messages, no crash, no read past the end."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import ModelProto, TensorProto
from products import LAYOUTS, Array, attention, joined, lookup, norm, product, run, session, with_computed_weight

import graphs
from bf16kit.messages.errors import RuntimeFailure
from bf16kit.runtime.ort import kernel
from bf16kit.runtime.ort.session import open_session

pytestmark = pytest.mark.skipif(not kernel.LIBRARY.exists(), reason="the kernel was not built: no C++17 compiler")
K, N = 300, 72
WEIGHT = graphs.values(K, N)
SHORT, COLUMNS = 40, (64, 32, 96)  # of joined products


def zeros(*shape: int, dtype: Any = np.float32) -> Array:
    return np.zeros(shape, dtype)


def bf16(elements: int) -> Array:
    return zeros(elements, dtype=ml_dtypes.bfloat16)


def bare() -> ModelProto:
    """Return a correct product that only the kernel can run."""
    model = product(WEIGHT)
    del model.functions[:]
    return model


# --- products ---------------------------------------------------------------------------------------------------------


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
        *(({name: None}, f"attribute {name} is missing") for name in ("k", "n", "layout", "activation")),
        ({"n": N + 1}, f"the weight, input 1, has {K * N} elements; k = {K} and n = {N + 1} need {K * (N + 1)}"),
    ],
    ids=str,
)
def test_a_wrong_attribute_is_rejected_at_load(attributes: dict[str, Any], words: str) -> None:
    with pytest.raises(RuntimeFailure, match=words):
        session(product(WEIGHT, **attributes))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("elements", [0, 1, K * N - 1, K * N + 1])
def test_a_weight_of_the_wrong_size_is_rejected_at_load(layout: str, elements: int) -> None:
    """The weight was truncated or made for another layer. It must not be read past its end."""
    words = f"the weight, input 1, has {elements} elements; k = {K} and n = {N} need {K * N}"
    with pytest.raises(RuntimeFailure, match=words):
        session(product(WEIGHT, layout=layout, stored=bf16(elements)))


def test_other_inputs_and_operators_are_rejected_at_load() -> None:
    for dtype in (np.float32, np.uint16):
        with pytest.raises(RuntimeFailure, match="cannot load"):
            session(product(WEIGHT, stored=zeros(K * N, dtype=dtype)))
    for inputs in (["x"], ["x", "w", "", "w"]):
        model = bare()
        del model.graph.node[0].input[:]
        model.graph.node[0].input.extend(inputs)
        with pytest.raises(RuntimeFailure, match="cannot load"):
            session(model)
    model = bare()
    model.graph.node[0].op_type = "Conv"
    with pytest.raises(RuntimeFailure, match="Conv"):
        session(model)


def test_a_weight_or_a_table_that_is_computed_is_rejected_at_load() -> None:
    for model in (bare(), joined(SHORT, COLUMNS), lookup(SHORT, 64)):
        with pytest.raises(RuntimeFailure, match="is computed; it must be a constant of the graph"):
            session(with_computed_weight(model))


def test_a_weight_at_an_odd_offset_is_rejected_or_read_correctly(tmp_path: Path) -> None:
    """ONNX Runtime maps the file at any offset that the graph names."""
    x = graphs.values(2, K, seed=2)
    model = bare()
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
def test_x_of_the_wrong_width_or_without_one_is_rejected_at_run_time(width: int) -> None:
    for model in (bare(), joined(K, COLUMNS)):
        for edge in (*model.graph.input, *model.graph.output):
            edge.CopyFrom(graphs.edge(edge.name))  # any shape
        with pytest.raises(RuntimeFailure, match=f"the last dimension of x is {width}; the weight has k = {K} rows"):
            run(model, zeros(2, width))
        with pytest.raises(RuntimeFailure, match="x is a scalar; it must have at least one dimension"):
            run(model, zeros())


@pytest.mark.parametrize("shape", [(N - 1,), (N + 1,), (1, N), (0,), (1,), ()], ids=str)
def test_a_bias_of_another_shape_is_rejected(shape: Sequence[int]) -> None:
    model = product(WEIGHT, zeros(*shape))
    message = f"the bias has {len(shape)} dimensions; it must have 1"
    if len(shape) == 1:
        message = f"dimension 0 of the bias is {shape[0]}; it must be {N}"
    with pytest.raises(RuntimeFailure, match=message):
        session(model)
    model.graph.input.append(graphs.edge("b"))  # computed: known only when it runs
    del model.graph.initializer[1]
    with pytest.raises(RuntimeFailure, match=message):
        run(model, zeros(2, K), zeros(*shape))


# --- several products, and look-ups -----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3])
def test_correct_graphs_run(count: int) -> None:
    """The next tests each change one thing in these graphs; that change is then what is rejected."""
    found = session(joined(SHORT, COLUMNS[:count])).run(None, {"x": graphs.values(3, SHORT)})
    assert [np.shape(each) for each in found] == [(3, n) for n in COLUMNS[:count]]
    assert run(lookup(SHORT, 64), np.array([0, 63, -64])).shape == (3, SHORT)


@pytest.mark.parametrize(("count", "position"), [(2, 1), (2, 2), (3, 1), (3, 2), (3, 3)])
@pytest.mark.parametrize("size", [None, "many", 0, -32, 2**31, 2**62, 2**31 - 1, 128], ids=str)
def test_a_wrong_size_of_a_joined_product_is_rejected_at_load(count: int, position: int, size: object) -> None:
    words = f"elements; k = 40 and n = {size} need" if size in (2**31 - 1, 128) else f"attribute n{position} is"
    with pytest.raises(RuntimeFailure, match=words):
        session(joined(SHORT, COLUMNS[:count], **{f"n{position}": size}))


@pytest.mark.parametrize(("count", "position"), [(2, 1), (2, 2), (3, 2), (3, 3)])
@pytest.mark.parametrize("off", [-1, 1, -SHORT * 32])
def test_a_joined_weight_or_a_table_of_the_wrong_size_is_rejected_at_load(count: int, position: int, off: int) -> None:
    """This matters most for truncated weights: none of the weights may be read past its end."""
    stored = [bf16(SHORT * n + (off if i == position else 0)) for i, n in enumerate(COLUMNS[:count], 1)]
    n = COLUMNS[position - 1]
    words = f"has {SHORT * n + off} elements; k = {SHORT} and n = {n} need {SHORT * n}"
    with pytest.raises(RuntimeFailure, match=words):
        session(joined(SHORT, COLUMNS[:count], stored))
    with pytest.raises(RuntimeFailure, match=words):
        session(lookup(SHORT, n, bf16(SHORT * n + off)))


@pytest.mark.parametrize("size", [None, "many", 0, -1, 2**31, 2**62], ids=str)
def test_a_wrong_depth_or_a_wrong_size_of_a_table_is_rejected_at_load(size: object) -> None:
    for name in ("k", "n"):
        with pytest.raises(RuntimeFailure, match=f"attribute {name} is"):
            session(lookup(SHORT, 64, **{name: size}))
    with pytest.raises(RuntimeFailure, match="attribute k is"):
        session(joined(SHORT, COLUMNS, k=size))


@pytest.mark.parametrize("index", [64, -65, 2**40, -(2**63), 2**63 - 1])
def test_an_index_out_of_range_is_rejected_at_run_time(index: int) -> None:
    with pytest.raises(RuntimeFailure, match=f"index {index}.* outside of a table of 64 rows"):
        run(lookup(SHORT, 64), np.array([0, index]))


# --- attention and norms ----------------------------------------------------------------------------------------------

_Q, _K = (2, 4, 3, 16), (2, 4, 5, 16)


@pytest.mark.parametrize(
    ("form", "shapes", "message"),
    [
        ("hhh", ((2, 3, 64), _K, _K), "q has 3 dimensions"),
        ("hhh", ((2, 5, 3, 16), _K, _K), "dimension 1 of q is 5, which does not fit to 4 heads"),
        ("hhr", (_Q, _K, (2, 5, 63)), "dimension 2 of v is 63, which does not fit to 4 heads"),
        ("hhh", (_Q, (1, 4, 5, 16), _K), "the batches of q and k: 2 and 1"),
        ("hhh", (_Q, _K, (3, 4, 5, 16)), "the batches of q and v: 2 and 3"),
        ("hhh", (_Q, (2, 4, 5, 8), _K), "the columns of q and k, of one head: 16 and 8"),
        ("hhh", (_Q, _K, (2, 4, 6, 16)), "the rows of k and v: 5 and 6"),
        ("hhh", ((2, 4, 3, 0), (2, 4, 5, 0), _K), "a head of q and k has 0 columns"),
        ("hhh_mask", (_Q, _K, _K, (2, 4, 3, 4)), "dimension 3 of the mask is 4; it must be 1 or 5"),
        ("hhh_mask", (_Q, _K, _K, (3, 1, 1, 5)), "dimension 0 of the mask is 3; it must be 1 or 2"),
        ("hhh_mask", (_Q, _K, _K, (1, 1, 1, 1, 5)), "the mask has 5 dimensions"),
    ],
)
def test_sizes_of_attention_that_do_not_fit_are_rejected(
    form: str, shapes: tuple[tuple[int, ...], ...], message: str
) -> None:
    with pytest.raises(RuntimeFailure, match=message):
        run(attention(f"Attention_{form}"), *(zeros(*shape) for shape in shapes))


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"heads": 6, "kv_heads": 4}, "heads = 6 is not a multiple of kv_heads = 4"),
        ({"heads": 0}, "attribute heads is 0"),
        ({"scale": 1}, "attribute scale is missing or of another type"),
        ({"scale": float("inf")}, "attribute scale is not a finite number"),
    ],
)
def test_invalid_attributes_of_attention_are_rejected(attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeFailure, match=message):
        session(attention("Attention_hhh", **attributes))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 8), (1, 8), (8,), (8,)), "dimension 0 of the skip is 1; it must be 2"),
        (((), (), (8,), (8,)), "x has no dimensions; it must have at least one"),
        (((2, 8), (2, 8, 1), (8,), (8,)), "the skip has 3 dimensions; it must have 2"),
        (((2, 8), (2, 8), (7,), (8,)), "dimension 0 of the scale is 7; it must be 8"),
        (((2, 8), (2, 8), (8,), (1, 8)), "the bias has 2 dimensions; it must have 1"),
    ],
)
def test_shapes_and_epsilons_of_a_norm_that_do_not_fit_are_rejected(
    shapes: tuple[tuple[int, ...], ...], message: str
) -> None:
    with pytest.raises(RuntimeFailure, match=message):
        run(norm("AddLayerNorm_bias"), *(zeros(*shape) for shape in shapes))
    for epsilon in (-1.0, float("nan"), float("inf"), 1):
        with pytest.raises(RuntimeFailure, match="attribute epsilon is"):
            session(norm("AddLayerNorm", epsilon))
