"""Input arrays are copied only if they are not contiguous."""

from __future__ import annotations

import numpy as np

from bf16kit.runtime import contiguous


def test_a_view_is_copied_and_a_contiguous_array_is_not() -> None:
    array = np.arange(6.0).reshape(2, 3)
    feeds = contiguous({"a": array, "t": array.T})
    assert feeds["a"] is array
    assert feeds["t"].flags.c_contiguous
    np.testing.assert_array_equal(feeds["t"], array.T)


def test_a_scalar_stays_a_scalar() -> None:
    """ONNX Runtime rejects a vector where a model takes a scalar."""
    assert contiguous({"steps": np.array(3)})["steps"].shape == ()
