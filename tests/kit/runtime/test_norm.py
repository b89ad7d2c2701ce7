"""``bf16kit::AddLayerNorm…`` and ``…RmsNorm…`` in real sessions. kernels/tests/norm_test.cpp has random cases."""

import numpy as np
import pytest
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


@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("shape", [(3, 384), (2, 5, 33), (7,), (1, 1), (0, 8)], ids=str)
def test_norms_are_within_the_rounding_error_of_fp32(op: str, shape: tuple[int, ...]) -> None:
    given = inputs(*shape)
    found = results(norm(op), *told(op, given), threads=2)
    np.testing.assert_allclose(found[0], exact(op, *given), rtol=1e-5, atol=2e-6)
    if "sum" in op:
        assert np.array_equal(found[1], given[0] + given[1])


def test_rows_without_elements_or_of_equal_ones_have_a_variance_of_zero_not_below() -> None:
    assert results(norm("RmsNorm"), *told("RmsNorm", inputs(3, 0)))[0].shape == (3, 0)
    x = np.random.default_rng(0).uniform(1e5, 1e7, (40, 1)).astype(np.float32) * np.ones(65536, np.float32)
    found = results(norm("AddLayerNorm"), x, np.zeros_like(x), np.ones(65536, np.float32))[0]
    assert np.isfinite(found).all()


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
