"""``bf16kit::MatMulBf16…`` in real sessions: products that first round their activations to bf16."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import products
import pytest
from numpy.typing import NDArray
from products import ACTIVATIONS, LAYOUTS, product, run

import graphs
from bf16kit.messages.errors import ConfigError
from bf16kit.runtime.ort import kernel

pytestmark = pytest.mark.skipif(not kernel.LIBRARY.exists(), reason="the kernel was not built: no C++17 compiler")
K, N = 301, 72  # K is odd; neither is a multiple of a panel, a chain of sums, or a vector of 16
Array = NDArray[Any]


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kernel.VARIABLE, raising=False)


def paths(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the paths that this processor can run and that give the same bits."""
    found = []
    for path in kernel.PATHS[:-1]:
        monkeypatch.setenv(kernel.VARIABLE, path)
        try:
            found.append(kernel.usable_kernel(rounds=True).path)
        except ConfigError:
            continue
    return found


def rounded(x: Array) -> Array:
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


@pytest.mark.parametrize("path", kernel.PATHS)
@pytest.mark.parametrize(("k", "n"), [(1, 1), (7, 31), (128, 32), (K, N)])
def test_operands_are_rounded_and_sums_are_not(path: str, k: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float64 on rounded activations, the error is that of fp32 sums: chains of 128 terms, then their sum."""
    if path != "portable" and path not in paths(monkeypatch):
        pytest.skip(f"this processor cannot run {path}")
    monkeypatch.setenv(kernel.VARIABLE, path)
    weight, bias, x = graphs.values(k, n), graphs.values(n, seed=1), graphs.values(9, k, seed=2, scale=k**0.5)
    found = run(product(weight, bias, operator="MatMulBf16"), x)
    additions = min(k, 128) + -(-k // 128)
    bound = additions * 2.0**-24 * np.abs(rounded(x)).astype(np.float64) @ np.abs(rounded(weight)).astype(np.float64)
    off = np.abs(found - products.exact(rounded(x), weight, bias))
    assert np.all(off <= bound + 2.0**-23 * np.abs(found))
    if k > 100:
        assert np.abs(found - products.exact(x, weight, bias)).max() > 100 * off.max(), "nothing was rounded"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_instructions_for_bf16_give_the_bits_of_their_emulations(
    layout: str, activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = product(graphs.values(K, N), graphs.values(N), layout=layout, activation=activation, operator="MatMulBf16")
    x = graphs.values(50, K, seed=2, scale=5)
    answers = []
    for path in paths(monkeypatch):
        monkeypatch.setenv(kernel.VARIABLE, path)
        answers.append(run(model, x))
    assert len(answers) > 0
    for answer in answers[1:]:
        assert np.array_equal(answer, answers[0])


def test_the_operator_and_not_the_processor_decides_the_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the variable names a path for bf16, a product in fp32 has the bits of fp32."""
    weight, x = graphs.values(K, N), graphs.values(20, K, seed=2)
    usual = run(product(weight), x)
    for path in paths(monkeypatch):
        monkeypatch.setenv(kernel.VARIABLE, path)
        assert np.array_equal(run(product(weight), x), usual)
        assert not np.array_equal(run(product(weight, operator="MatMulBf16"), x), usual)


def test_subnormals_are_zero_where_activations_are_rounded() -> None:
    weight, x = np.ones((2, 32), np.float32), np.array([[1e-39, 1e-39]], np.float32)
    assert np.all(run(product(weight, operator="MatMulBf16"), x) == 0)
    assert np.all(run(product(weight), x) == np.float32(1e-39) + np.float32(1e-39))
