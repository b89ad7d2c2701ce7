"""Slices that fp32 does not resolve are excused; a reference that is wrong in a slice is not."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from bf16kit.drift.slices import Values
from bf16kit.messages.errors import ConversionError
from bf16kit.numerics.tensors import TensorSpec
from converter.source import Feeds
from converter.verify.fp32noise import Noise
from converter.verify.measure import slice_scales
from converter.verify.oracle import OracleRun, resolved

OUT = (TensorSpec("y", "float32", ("n", 4)),)
Array = NDArray[np.float32]


class Nudged(Noise):
    """A source whose outputs change by ``change`` of each value's column when its weights are perturbed."""

    def __init__(self, outputs: list[Feeds], change: list[float]) -> None:
        self._outputs, self._change = outputs, np.array(change, np.float32)

    def pairs(self, name: str) -> list[list[tuple[Array, Array]]]:
        return [[(each[name], each[name] + self._change) for each in self._outputs]]


def judge(difference: list[float], noise: list[float] | None) -> list[Values]:
    """Return the scales if the reference differs from the source by ``difference`` in each column."""
    own: list[Feeds] = [{"y": np.random.default_rng(0).standard_normal((20, 4)).astype(np.float32)}]
    reference: list[Feeds] = [{"y": own[0]["y"] + np.array(difference, np.float32)}]
    run = OracleRun(own, "a test", noise=None if noise is None else Nudged(own, noise))
    return resolved(run, reference, OUT, 0, slice_scales(reference, OUT, 0))["y"]


def test_slices_that_agree_keep_their_scale() -> None:
    (scale,) = judge([0, 1e-6, 1e-3, 0.01], [1, 1, 1, 1])
    np.testing.assert_allclose(scale, 1, atol=0.6)


def test_a_slice_at_fp32_noise_is_excused() -> None:
    (scale,) = judge([0, 0.5, 0, 0], [0, 0.2, 0, 0])
    assert list(np.isinf(scale)) == [False, True, False, False]


def test_a_slice_that_fp32_resolves_is_judged_although_another_is_excused() -> None:
    """The noise of the perturbed source alone excuses nothing: it is larger than that of two programs."""
    (scale,) = judge([0, 0.5, 0.01, 0.03], [0.2, 0.2, 0.2, 0.2])
    assert list(np.isinf(scale)) == [False, True, False, True]


def test_a_slice_of_the_reference_that_noise_does_not_explain_is_an_error() -> None:
    with pytest.raises(ConversionError, match=r"output 'y' differs in index 2 along its axis 0"):
        judge([0, 0, 0.5, 0], [0, 0, 0.01, 0])


def test_without_a_graph_to_perturb_the_difference_itself_is_the_noise() -> None:
    (scale,) = judge([0, 0.5, 0, 0], None)
    assert list(np.isinf(scale)) == [False, True, False, False]
