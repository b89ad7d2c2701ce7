"""``bf16kit::AddLayerNorm…`` and ``…RmsNorm…`` in real sessions: results, and which are bit-identical."""

from __future__ import annotations

import numpy as np
import pytest
from kernelpaths import use
from products import Array, norm, norm_inputs, results

from bf16kit.runtime.ort import kernel

pytestmark = pytest.mark.skipif(not kernel.LIBRARY.exists(), reason="the kernel was not built: no C++17 compiler")
OPERATORS = [f"AddLayerNorm{bias}{total}" for bias in ("", "_bias") for total in ("", "_sum")]
OPERATORS += ["RmsNorm", "AddRmsNorm", "AddRmsNorm_sum"]


def inputs(*shape: int) -> list[Array]:
    generator = np.random.default_rng(0)
    return [generator.standard_normal(size, np.float32) for size in (shape, shape, shape[-1:], shape[-1:])]


def told(op: str, given: list[Array]) -> list[Array]:
    """Return those of :func:`inputs` that ``op`` takes."""
    named = dict(zip(("x", "skip", "scale", "bias"), given, strict=True))
    return [named[name] for name in norm_inputs(op)]


def exact(op: str, x: Array, skip: Array, scale: Array, bias: Array) -> Array:
    s = (x + skip if "Add" in op else x).astype(np.float64)
    off = s if "Rms" in op else s - s.mean(-1, keepdims=True)
    bias = bias if "bias" in op else np.zeros_like(bias)
    return np.asarray(off / np.sqrt((off**2).mean(-1, keepdims=True) + 1e-5) * scale + bias)


@pytest.mark.parametrize("path", kernel.PATHS)
@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("shape", [(3, 384), (2, 5, 33), (7,), (1, 1)], ids=str)
def test_norms_are_within_the_rounding_error_of_fp32(
    op: str, shape: tuple[int, ...], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(path, monkeypatch)
    given = inputs(*shape)
    found = results(norm(op), *told(op, given))
    np.testing.assert_allclose(found[0], exact(op, *given), rtol=1e-5, atol=2e-6)
    if "sum" in op:
        assert np.array_equal(found[1], given[0] + given[1])


@pytest.mark.parametrize("path", kernel.PATHS)
def test_a_mean_a_hundred_thousand_times_the_deviations_costs_no_accuracy(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(path, monkeypatch)
    x, skip = inputs(64, 768)[0] + np.float32(1e5), np.zeros((64, 768), np.float32)
    scale, bias = np.ones(768, np.float32), np.zeros(768, np.float32)
    found = results(norm("AddLayerNorm"), x, skip, scale)[0]
    np.testing.assert_allclose(found, exact("AddLayerNorm", x, skip, scale, bias), rtol=0, atol=5e-6)


def test_a_row_of_equal_elements_has_a_variance_of_zero_not_below() -> None:
    x = np.random.default_rng(0).uniform(1e5, 1e7, (40, 1)).astype(np.float32) * np.ones(65536, np.float32)
    found = results(norm("AddLayerNorm"), x, np.zeros_like(x), np.ones(65536, np.float32))[0]
    assert np.isfinite(found).all()


@pytest.mark.parametrize("op", ["AddLayerNorm_bias", "AddRmsNorm", "RmsNorm"])
def test_threads_paths_and_neighbours_change_no_bit(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    full, made = inputs(3000, 129), norm(op)
    given, row = told(op, full), told(op, [full[0][17:18], full[1][17:18], *full[2:]])
    (alone,) = results(made, *given)
    assert np.array_equal(results(made, *given, threads=3)[0], alone)
    assert np.array_equal(results(made, *row)[0], alone[17:18])
    use("avx2", monkeypatch)
    assert np.array_equal(results(made, *given)[0], alone)


@pytest.mark.parametrize("op", ["AddLayerNorm_bias", "AddRmsNorm", "RmsNorm"])
@pytest.mark.parametrize("shape", [(0, 8), (3, 0)], ids=str)
def test_empty_inputs_give_empty_outputs(shape: tuple[int, ...], op: str) -> None:
    assert results(norm(op), *told(op, inputs(*shape)))[0].shape == shape


@pytest.mark.parametrize("op", ["AddLayerNorm", "AddRmsNorm", "RmsNorm"])
def test_values_that_are_not_finite_affect_only_their_own_row(op: str) -> None:
    given, made = inputs(4, 40), norm(op)
    clean = results(made, *told(op, given))[0]
    for value in (np.nan, np.inf, -np.inf):
        spoilt = given[0].copy()
        spoilt[1, 3] = value
        found = results(made, *told(op, [spoilt, *given[1:]]))[0]
        # The root mean square of a row with an infinity is infinite: finite values become zero, as in float64.
        assert np.isnan(found[1] if "Layer" in op or np.isnan(value) else found[1, 3]).all()
        assert np.array_equal(found[[0, 2, 3]], clean[[0, 2, 3]])
