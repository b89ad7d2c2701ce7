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


def _only_singles(x: Array) -> Array:
    if len(x) != 1:
        raise RuntimeFailure("a Reshape with a fixed size")
    return x


@pytest.mark.parametrize(
    ("function", "axis"),
    [
        (lambda x: x * 2, 0),
        (lambda x: x * np.float32(1 + 1e-6 * len(x)), 0),  # sums in another order: fp32 noise
        (lambda x: x - x.mean(0), None),  # mixes samples
        (lambda x: x * len(x), None),
        (lambda x: x[:1], None),  # gives one row only
        (lambda x: np.where(len(x) > 1, np.nan, x), None),
        (_only_singles, None),
    ],
    ids=["apart", "noise", "mean", "count", "first", "nan", "fixed"],
)
def test_the_batch_axis_is_found_by_running_two_samples_together(
    function: Callable[[Array], Array], axis: int | None
) -> None:
    assert batch_axis(Computed(function), IN, OUT, PAIR) == axis


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
    def row(*values: float) -> dict[str, Array]:
        return {"x": np.array([values], np.float32)}

    feeds = [row(1, 2), row(1, 2, 3), row(4, 5, 6)]
    assert batch_axis(Computed(lambda x: x * 2), IN, OUT, feeds) == 0
    assert batch_axis(Computed(lambda x: x * 2), IN, OUT, feeds[:2]) is None  # no pair: nothing was compared


def _filled(value: float) -> Callable[[Array], Array]:
    """Return a model whose rows interact, with one slot filled."""

    def function(x: Array) -> Array:
        mixed: Array = x - x.mean(0)
        mixed[:, 0] = value
        return mixed

    return function


@pytest.mark.parametrize("value", [-1e9, 1e9, np.inf, -np.inf, np.nan])
def test_no_fill_hides_that_rows_interact(value: float) -> None:
    """A norm over the whole sample sees the fill alone."""
    assert batch_axis(Computed(_filled(value)), IN, OUT, PAIR) is None


@pytest.mark.parametrize("scale", [1e6, 1e3])
def test_no_large_channel_hides_that_another_one_leaks(scale: float) -> None:
    def function(x: Array) -> Array:
        y = x * np.float32(1e-3)
        y[:, 1] += 1e-4 * x[:, 1].mean()
        y[:, 0] = x[:, 0] * scale
        return y

    assert batch_axis(Computed(function), IN, OUT, PAIR) is None


@pytest.mark.parametrize("value", [-1e9, np.inf, np.nan])
def test_rows_that_do_not_interact_may_hold_fills_and_infinities(value: float) -> None:
    def function(x: Array) -> Array:
        y = 2 * x
        y[:, 0] = value
        return y

    assert batch_axis(Computed(function), IN, OUT, PAIR) == 0


def test_a_dependence_on_the_order_is_seen() -> None:
    """The first row is right in every batch, the others get a share of it."""
    assert batch_axis(Computed(lambda x: x + 0.01 * (x - x[:1])), IN, OUT, PAIR) is None


def test_a_companion_that_is_not_finite_must_not_spread() -> None:
    """A sum over the batch, times zero, shows only when a companion is infinite."""
    with np.errstate(invalid="ignore"):
        assert batch_axis(Computed(lambda x: x + 0 * x.sum(0)), IN, OUT, PAIR) is None


def test_a_dependence_that_only_three_samples_show_is_seen() -> None:
    feeds = [{"x": np.arange(12, dtype=np.float32).reshape(3, 4)}]
    assert batch_axis(Computed(lambda x: x * (1 if len(x) < 3 else 2)), IN, OUT, feeds) is None
