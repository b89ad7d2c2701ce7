"""``bf16kit::MatMul`` and ``MatMulBf16…`` in real sessions: rows, layouts, activations, paths, threads, and memory.

kernels/tests/property_test.cpp compares random products on every path, and which results must be bit-identical.
"""

from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from kernelpaths import use
from mapped import mapped_kb
from onnx import TensorProto
from products import ACTIVATIONS, LAYOUTS, Array, exact, product, run

import graphs
from bf16kit.messages.errors import RuntimeFailure
from bf16kit.runtime.ort import kernel
from bf16kit.runtime.ort.session import open_session

pytestmark = pytest.mark.skipif(not kernel.LIBRARY.exists(), reason="the kernel was not built: no C++17 compiler")
K, N = 301, 72  # K is odd; neither is a multiple of a panel, a chain of sums, or a vector of 16


def rounded(x: Array) -> Array:
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def bound(x: Array, weight: Array) -> Array:
    """Return (128 + K/128)·2⁻²⁴ of Σ|x||w| for each element of the product: the bound for this order of sums."""
    additions = min(len(weight), 128) + -(-len(weight) // 128)
    sums = np.abs(x).astype(np.float64) @ np.abs(rounded(weight)).astype(np.float64)
    return np.asarray(1.0001 * additions * 2.0**-24 * sums + 1e-6)


@pytest.mark.parametrize("path", kernel.PATHS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("k", "n"), [(1, 1), (K, N), (257, 65)])
def test_products_with_bf16_weights_are_within_the_error_bound(
    path: str, layout: str, k: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where activations are rounded too, the sums are still those of fp32. The operator decides, not the processor."""
    weight, bias, x = graphs.values(k, n), graphs.values(n, seed=1), graphs.values(9, k, seed=2, scale=k**0.5)
    use(path, monkeypatch, rounds=True)
    found = run(product(weight, bias, layout=layout, operator="MatMulBf16"), x)
    off = np.abs(found - exact(rounded(x), weight, bias))
    assert np.all(off <= bound(rounded(x), weight) + 2.0**-23 * np.abs(found))
    if k > 100:
        assert np.abs(found - exact(x, weight, bias)).max() > 100 * off.max(), "nothing was rounded"
    use(path, monkeypatch)
    assert np.all(np.abs(run(product(weight, bias, layout=layout), x) - exact(x, weight, bias)) <= bound(x, weight))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
def test_activations_are_those_of_float64(activation: str, layout: str, has_bias: bool) -> None:
    weight, bias = graphs.values(K, N), graphs.values(N, seed=1) if has_bias else None
    x = graphs.values(5, K, seed=2, scale=3)
    found = run(product(weight, bias, layout=layout, activation=activation), x)
    np.testing.assert_allclose(found, exact(x, weight, bias, activation), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("shape", [(K,), (1, K), (2, 3, K), (2, 1, 4, K), (0, K), (2, 0, K)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_leading_dimensions_are_rows(shape: tuple[int, ...], layout: str) -> None:
    weight, x = graphs.values(K, N), graphs.values(4, 3, 2, K, seed=2).reshape(-1)[: np.prod(shape)].reshape(shape)
    found = run(product(weight, layout=layout, x=[*"abc"[: len(shape) - 1], K]), x)
    assert found.shape == (*shape[:-1], N)
    assert np.all(np.abs(found - exact(x, weight)) <= bound(x, weight))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [1, 5, 130])
def test_the_number_of_threads_changes_no_bit(layout: str, rows: int) -> None:
    model = product(graphs.values(1024, 520), layout=layout)
    x = graphs.values(rows, 1024, seed=2)
    alone = run(model, x, threads=1)
    assert np.array_equal(run(model, x, threads=2), alone)
    assert np.array_equal(run(model, x, threads=3), alone)


@pytest.mark.parametrize("listed", [(), ("MatMul_panels",), ("GRU", "MatMul_panels")])
def test_a_session_has_the_operators_that_it_lists_and_without_a_list_all(listed: Sequence[str]) -> None:
    model = product(graphs.values(64, 40), operator="MatMul_panels")
    assert not model.functions  # only the kernel can run it
    for others in ("GRU", "MatMul", "MatMul_panels_bias", "MatMulBf16_panels"):
        with pytest.raises(RuntimeFailure, match="MatMul_panels"):
            open_session(model.SerializeToString(), library=kernel.LIBRARY, operators=[others])
    assert open_session(model.SerializeToString(), library=kernel.LIBRARY, operators=listed)


def test_weights_are_read_in_place_from_the_mapped_file(tmp_path: Path) -> None:
    """There is no second copy: the pages remain those of the file, shared by all processes that map it."""
    width = 1024  # 2 MiB of bf16
    model = product(graphs.values(width, width))
    path = graphs.save_external(model, tmp_path / "cpu.onnx", {TensorProto.BFLOAT16: "weights.bf16"})
    opened = open_session(path, threads=1, library=kernel.LIBRARY)
    opened.run(["y"], {"x": graphs.values(1, width)})
    mapped = mapped_kb("weights.bf16")
    assert mapped["Rss"] >= 2048 - 8
    assert mapped["Anonymous"] == 0
