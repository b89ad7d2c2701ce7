"""The batch axis: declared only if samples give the same outputs in any company as alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from computed import IN, OUT, Computed

from bf16kit.messages.errors import RuntimeFailure
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import Array
from converter.verify.observedshapes import batch_axis

PAIR = [{"x": np.arange(8, dtype=np.float32).reshape(2, 4)}]
THREE = [{"x": np.arange(12, dtype=np.float32).reshape(3, 4)}]
FILLS = (-1e9, 1e9, np.inf, -np.inf, np.nan)


def _only_singles(x: Array) -> Array:
    if len(x) != 1:
        raise RuntimeFailure("a Reshape with a fixed size")
    return x


def _filled(value: float, function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Return ``function`` with one slot filled: a norm over the whole sample sees the fill alone."""

    def filled(x: Array) -> Array:
        y = np.array(function(x))
        y[:, 0] = value
        return y

    return filled


def _leaking(scale: float) -> Callable[[Array], Array]:
    """Return a model with one channel that leaks, and one that is far larger."""

    def function(x: Array) -> Array:
        y = x * np.float32(1e-3)
        y[:, 1] += 1e-4 * x[:, 1].mean()
        y[:, 0] = x[:, 0] * scale
        return y

    return function


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2,
        lambda x: x * np.float32(1 + 1e-6 * len(x)),  # sums in another order: fp32 noise
        *(_filled(value, lambda x: 2 * x) for value in FILLS),
    ],
)
def test_a_model_whose_rows_do_not_interact_has_a_batch_axis(function: Callable[[Array], Array]) -> None:
    assert batch_axis(Computed(function), IN, OUT, PAIR) == 0


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x - x.mean(0),  # mixes samples
        *(_filled(value, lambda x: x - x.mean(0)) for value in FILLS),
        _leaking(1e6),
        _leaking(1e3),
        lambda x: x + 0.01 * (x - x[:1]),  # the first row is right in every batch, the others get a share of it
        lambda x: x + 0 * x.sum(0),  # shows only when a companion is infinite
        lambda x: x * (1 if len(x) < 3 else 2),  # only three samples show it
        lambda x: x * len(x),
        lambda x: x[:1],  # gives one row only
        lambda x: np.where(len(x) > 1, np.nan, x),
        _only_singles,
    ],
)
def test_a_model_whose_rows_interact_has_none(function: Callable[[Array], Array]) -> None:
    with np.errstate(invalid="ignore"):
        assert batch_axis(Computed(function), IN, OUT, THREE) is None


def test_a_row_beside_an_extreme_one_is_not_compared_with_the_row_alone() -> None:
    """Its sums may have another order alone, and one row shows no variation by which such noise could be excused."""
    feeds = [{"x": np.random.default_rng(seed).standard_normal((1, 4)).astype(np.float32)} for seed in range(3)]
    step = np.array([1, -1, 1, -1], np.float32)

    def reordered(x: Array) -> Array:
        return np.asarray(x + (3e-5 * step if len(x) > 1 else 0), np.float32)

    assert batch_axis(Computed(reordered), IN, OUT, feeds) == 0


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        ((TensorSpec("x", "float32", (2, 4)),), OUT),
        (IN, (TensorSpec("y", "float32", (1, 4)),)),
        (IN, (TensorSpec("y", "float32", ()),)),
        ((*IN, TensorSpec("z", "float32", ("m", 4))), OUT),
        ((*IN, TensorSpec("steps", "int64", ())), OUT),
    ],
    ids=["fixed input", "fixed output", "scalar output", "two names", "scalar input"],
)
def test_shapes_alone_can_rule_out_a_batch_axis(
    inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]
) -> None:
    assert batch_axis(Computed(lambda x: x), inputs, outputs, PAIR) is None


def test_two_feeds_of_one_row_and_the_same_shape_are_a_pair() -> None:
    feeds = [{"x": np.array([row], np.float32)} for row in ((1, 2), (1, 2, 3), (4, 5, 6))]
    assert batch_axis(Computed(lambda x: x * 2), IN, OUT, feeds) == 0
    assert batch_axis(Computed(lambda x: x * 2), IN, OUT, feeds[:2]) is None  # no pair: nothing was compared
