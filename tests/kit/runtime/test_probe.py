from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from bf16kit.runtime.probe import TERMS, classify, classify_rounding, probe_onnx, weights

Array = NDArray[Any]


def rounded(x: Array) -> Array:
    return np.asarray(x.astype(ml_dtypes.bfloat16).astype(np.float32))


def one_by_one(terms: Array) -> Array:
    """Return the sum over axis 0 with one bf16 accumulator: the sum of 4,096 ones is 256."""
    total = np.zeros(terms.shape[1:], np.float32)
    for term in terms:
        total = rounded(total + term)
    return total


def in_lanes(count: int) -> Callable[[Array], Array]:
    """Return a sum with ``count`` bf16 accumulators, each for every ``count``-th term, as in vector instructions."""
    return lambda terms: one_by_one(one_by_one(terms.reshape(-1, count, terms.shape[1])))


def in_slices(count: int) -> Callable[[Array], Array]:
    """Return a sum of slices in fp32, with the partial sums added in bf16: cuBLAS' reduced-precision split-K."""
    return lambda terms: one_by_one(np.stack([rounded(part.sum(axis=0)) for part in np.array_split(terms, count)]))


def multiplying(add: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Return a matrix product that adds its terms with ``add``. All rows of the probe's input are equal."""

    def product(x: Array) -> Array:
        return np.tile(add(x[0][:, None] * weights()), (len(x), 1))

    return product


def test_one_bf16_accumulator_gives_256_for_4096_ones_and_is_detected() -> None:
    assert one_by_one(np.ones((TERMS, 1), np.float32)) == 256
    assert classify(multiplying(one_by_one)) == "bf16"


@pytest.mark.parametrize("count", [2, 8, 16, 32, 64])
@pytest.mark.parametrize("parts", [in_lanes, in_slices])
def test_bf16_accumulation_in_vector_lanes_or_in_slices_is_detected(
    parts: Callable[[int], Callable[[Array], Array]], count: int
) -> None:
    """16 lanes add 4,096 ones exactly, 256 each, so ones alone would not reveal bf16."""
    assert classify(multiplying(parts(count))) == "bf16"


def test_reduced_precision_for_many_rows_only_is_detected() -> None:
    fine, coarse = multiplying(lambda terms: terms.sum(axis=0)), multiplying(one_by_one)
    assert classify(lambda x: fine(x) if len(x) == 1 else coarse(x)) == "bf16"


@pytest.mark.parametrize("order", [1, -1])
def test_fp32_accumulation_in_any_order_is_detected(order: int) -> None:
    assert classify(multiplying(lambda terms: np.add.accumulate(terms[::order], axis=0)[-1])) == "fp32"


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf, 1e9])
def test_a_device_with_wrong_sums_is_unknown(value: float) -> None:
    assert classify(lambda x: np.full((len(x), weights().shape[1]), value, np.float32)) == "unknown"


def rounding(add: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Return a matrix product that rounds x to bf16 before it multiplies."""
    return lambda x: multiplying(add)(rounded(x))


def test_sums_of_rounded_activations_are_told_apart() -> None:
    assert classify_rounding(rounding(lambda terms: terms.sum(axis=0))) == "fp32"
    for add in (one_by_one, in_lanes(16), in_slices(4)):
        assert classify_rounding(rounding(add)) == "bf16"


def _cut(x: Array) -> Array:
    return (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def _half_up(x: Array) -> Array:
    return ((x.view(np.uint32) + np.uint32(0x8000)) & np.uint32(0xFFFF0000)).view(np.float32)


@pytest.mark.parametrize("narrow", [lambda x: x, _cut, _half_up], ids=["not at all", "cut off", "ties up"])
def test_activations_that_are_not_rounded_to_nearest_even_are_unknown(narrow: Callable[[Array], Array]) -> None:
    add = multiplying(lambda terms: terms.sum(axis=0))
    assert classify_rounding(lambda x: add(narrow(x))) == "unknown"


@pytest.mark.parametrize("precision", ["bf16", "bf16-weights", "fp32"])
def test_onnx_runtime_accumulates_in_fp32_on_this_cpu(precision: str) -> None:
    assert probe_onnx("cpu", precision) == "fp32"
