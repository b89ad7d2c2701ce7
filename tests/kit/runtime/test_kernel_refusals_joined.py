"""Errors of nodes that compute several products and of nodes that look rows up: at load or at run time."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import products
import pytest
from products import joined, lookup, session

import graphs
from bf16kit.messages.errors import RuntimeFailure
from bf16kit.runtime.ort import kernel
from bf16kit.runtime.ort.session import as_runtime_failure

pytestmark = pytest.mark.skipif(not kernel.LIBRARY.exists(), reason="the kernel was not built: no C++17 compiler")
K, COLUMNS = 40, (64, 32, 96)


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kernel.VARIABLE, raising=False)


def zeros(elements: int) -> np.ndarray[Any, np.dtype[Any]]:
    return np.zeros(elements, ml_dtypes.bfloat16)


@pytest.mark.parametrize("count", [2, 3])
def test_correct_graphs_run(count: int) -> None:
    """The other tests each change one thing in these graphs; that change is then what is rejected."""
    found = session(joined(K, COLUMNS[:count])).run(None, {"x": graphs.values(3, K)})
    assert [np.shape(each) for each in found] == [(3, n) for n in COLUMNS[:count]]
    assert np.shape(session(lookup(K, 64)).run(["y"], {"ids": np.array([0, 63, -64])})[0]) == (3, K)


@pytest.mark.parametrize(("count", "position"), [(2, 1), (2, 2), (3, 1), (3, 2), (3, 3)])
@pytest.mark.parametrize(
    ("size", "words"),
    [
        (None, "attribute n{} is missing or of another type; it must be an integer"),
        ("many", "attribute n{} is missing or of another type; it must be an integer"),
        (0, "attribute n{} is 0; it must be between 1"),
        (-32, "attribute n{} is -32; it must be between 1"),
        (2**31, "attribute n{} is 2147483648; it must be between 1"),
        (2**62, "attribute n{} is 4611686018427387904; it must be between 1"),
        (2**31 - 1, "elements; k = 40 and n = 2147483647 need"),
        (128, "elements; k = 40 and n = 128 need 5120"),
    ],
    ids=str,
)
def test_a_wrong_size_of_a_joined_product_is_rejected_at_load(
    count: int, position: int, size: object, words: str
) -> None:
    with pytest.raises(RuntimeFailure, match=words.format(position)):
        session(joined(K, COLUMNS[:count], **{f"n{position}": size}))


@pytest.mark.parametrize("size", [None, 0, -1, 2**40, K + 1], ids=str)
def test_a_wrong_depth_of_joined_products_is_rejected_at_load(size: int | None) -> None:
    with pytest.raises(RuntimeFailure, match="k"):
        session(joined(K, COLUMNS, k=size))


@pytest.mark.parametrize(("count", "position"), [(2, 1), (2, 2), (3, 2), (3, 3)])
@pytest.mark.parametrize("off", [-1, 1, -K * 32])
def test_a_joined_weight_of_the_wrong_size_is_rejected_at_load(count: int, position: int, off: int) -> None:
    """This matters most for truncated weights: none of the weights may be read past its end."""
    stored = [zeros(K * n + (off if i == position else 0)) for i, n in enumerate(COLUMNS[:count], 1)]
    n = COLUMNS[position - 1]
    with pytest.raises(RuntimeFailure, match=f"has {K * n + off} elements; k = {K} and n = {n} need {K * n}"):
        session(joined(K, COLUMNS[:count], stored))


def test_a_joined_weight_that_is_computed_is_rejected_at_load() -> None:
    with pytest.raises(RuntimeFailure, match="is computed; it must be a constant of the graph"):
        session(products.with_computed_weight(joined(K, COLUMNS)))


def test_x_of_the_wrong_width_is_rejected_at_run_time() -> None:
    model = joined(K, COLUMNS)
    model.graph.input[0].CopyFrom(graphs.edge("x", ["rows", "width"]))
    opened = session(model)
    with pytest.raises(RuntimeFailure, match=f"the last dimension of x is {K - 1}"), as_runtime_failure("running"):
        opened.run(None, {"x": np.zeros((2, K - 1), np.float32)})


@pytest.mark.parametrize("name", ["k", "n"])
@pytest.mark.parametrize("size", [None, "many", 0, -1, 2**31, 2**62], ids=str)
def test_a_wrong_size_of_a_table_is_rejected_at_load(name: str, size: object) -> None:
    with pytest.raises(RuntimeFailure, match=f"attribute {name} is"):
        session(lookup(K, 64, **{name: size}))


@pytest.mark.parametrize("elements", [0, 1, K * 64 - 1, K * 64 + 1, K * 32])
def test_a_table_with_the_wrong_number_of_elements_is_rejected_at_load(elements: int) -> None:
    with pytest.raises(RuntimeFailure, match=f"has {elements} elements; k = {K} and n = 64 need {K * 64}"):
        session(lookup(K, 64, zeros(elements)))


def test_a_table_that_is_computed_is_rejected_at_load() -> None:
    with pytest.raises(RuntimeFailure, match="is computed; it must be a constant of the graph"):
        session(products.with_computed_weight(lookup(K, 64)))


@pytest.mark.parametrize("index", [64, -65, 2**40, -(2**63), 2**63 - 1])
def test_an_index_out_of_range_is_rejected_at_run_time(index: int) -> None:
    opened = session(lookup(K, 64))
    with (
        pytest.raises(RuntimeFailure, match=f"index {index}.* outside of a table of 64 rows"),
        as_runtime_failure("running"),
    ):
        opened.run(["y"], {"ids": np.array([0, index])})
