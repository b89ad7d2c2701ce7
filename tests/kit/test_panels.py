"""Panels: packing to the exact bytes of the documented layout, and unpacking."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from bf16kit.numerics import panels
from bf16kit.numerics.panels import WIDTH, pack, strips, unpack
from bf16kit.numerics.rounding import BF16

# Up to three panels with every kind of tail, and matrices without rows or columns.
SIDES = st.integers(0, 2 * WIDTH + 5)
AXES = st.sampled_from([0, 1])


def counted(rows: int, columns: int) -> NDArray[Any]:
    """Return a bfloat16 matrix in which all elements have different bits."""
    return np.arange(rows * columns, dtype=np.uint16).reshape(rows, columns).view(BF16)


@given(SIDES, SIDES, AXES, st.integers(1, 1 << 14))
def test_every_byte_is_where_the_format_says_and_unpacking_restores_it(
    rows: int, columns: int, axis: int, strip: int
) -> None:
    """Each element is checked against the formula of docs/artifact-format.md, packed at once or in strips."""
    matrix = counted(rows, columns)
    k_size, n_size = (rows, columns) if axis == 1 else (columns, rows)
    expected = bytearray(2 * matrix.size)
    for n in range(n_size):
        p = n // 32
        w = min(32, n_size - 32 * p)
        for k in range(k_size):
            at = 2 * (32 * k_size * p + k * w + (n - 32 * p))
            expected[at : at + 2] = matrix[(k, n) if axis == 1 else (n, k)].tobytes()
    flat = pack(matrix, axis)
    assert flat.tobytes() == bytes(expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(panels, "STRIP", strip)
        assert b"".join(strips(matrix, axis)) == bytes(expected)
    assert b"".join(strips(matrix, None)) == matrix.tobytes()
    back = unpack(flat, matrix.shape, axis)
    assert (back.dtype, back.shape, back.tobytes()) == (matrix.dtype, matrix.shape, matrix.tobytes())
    assert back.flags.c_contiguous
    assert not matrix.size or not (np.shares_memory(flat, matrix) or np.shares_memory(back, flat))


@pytest.mark.parametrize(("shape", "axis"), [((8,), 0), ((2, 2, 2), 1), ((), 0), ((4, 2), 2), ((4, 2), -1)])
def test_an_array_that_is_not_a_matrix_and_a_wrong_axis_are_rejected(shape: tuple[int, ...], axis: int) -> None:
    with pytest.raises(ValueError, match=rf"axis 0 or 1 of a matrix, not along axis {axis} of \[.*\]"):
        pack(np.zeros(shape), axis)
    with pytest.raises(ValueError, match="axis 0 or 1 of a matrix"):
        unpack(np.zeros(8), shape, axis)


@pytest.mark.parametrize("flat", [np.zeros(7), np.zeros(9), np.zeros((2, 4))])
def test_panels_of_another_size_are_rejected(flat: NDArray[Any]) -> None:
    with pytest.raises(ValueError, match=r"panels of \[4, 2\] are 8 elements in a row, got \["):
        unpack(flat, (4, 2), 1)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shape", [(5, 70), (70, 5), (97, 40), (1, 1), (3, 0)])
def test_any_range_of_rows_equals_that_of_the_matrix(shape: tuple[int, int], axis: int) -> None:
    matrix = np.arange(shape[0] * shape[1], dtype=np.float32).reshape(shape)
    flat = pack(matrix, axis)
    for start in range(shape[0]):
        for stop in range(start, shape[0] + 1):
            np.testing.assert_array_equal(panels.rows(flat, shape, axis, start, stop), matrix[start:stop])
