"""Panels: packing to the exact bytes of the documented layout, and unpacking."""

from __future__ import annotations

from typing import Any

import ml_dtypes
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
    return np.arange(rows * columns, dtype=np.uint16).reshape(rows, columns).view(ml_dtypes.bfloat16)


@given(SIDES, SIDES, AXES)
def test_unpacking_restores_what_was_packed(rows: int, columns: int, axis: int) -> None:
    matrix = counted(rows, columns)
    back = unpack(pack(matrix, axis), matrix.shape, axis)
    assert back.dtype == matrix.dtype
    assert back.shape == matrix.shape
    assert back.tobytes() == matrix.tobytes()
    assert back.flags.c_contiguous


@given(SIDES, SIDES, AXES)
def test_every_byte_is_where_the_format_says(rows: int, columns: int, axis: int) -> None:
    """Each element is checked against the formula of docs/artifact-format.md."""
    matrix = counted(rows, columns)
    k_size, n_size = (rows, columns) if axis == 1 else (columns, rows)
    expected = bytearray(2 * matrix.size)
    for n in range(n_size):
        p = n // 32
        w = min(32, n_size - 32 * p)
        for k in range(k_size):
            at = 2 * (32 * k_size * p + k * w + (n - 32 * p))
            expected[at : at + 2] = matrix[(k, n) if axis == 1 else (n, k)].tobytes()
    assert pack(matrix, axis).tobytes() == bytes(expected)


@given(SIDES, SIDES)
def test_a_matrix_and_its_transpose_have_the_same_panels(rows: int, columns: int) -> None:
    """The axis says which of the two was stored; the product reads the same bytes."""
    matrix = counted(rows, columns)
    assert pack(matrix, 1).tobytes() == pack(matrix.T, 0).tobytes()
    assert pack(matrix, 1).tobytes() == pack(np.ascontiguousarray(matrix.T), 0).tobytes()


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
def test_any_dtype_keeps_its_bits(dtype: type[np.generic]) -> None:
    matrix = np.arange(40 * 70).reshape(40, 70).astype(dtype)
    assert unpack(pack(matrix, 0), (40, 70), 0).tobytes() == matrix.tobytes()


def test_results_do_not_share_memory_with_the_arguments() -> None:
    """This also holds for a single panel, whose bytes equal those of the matrix."""
    matrix = counted(4, WIDTH)
    flat = pack(matrix, 1)
    assert not np.shares_memory(flat, matrix)
    assert not np.shares_memory(unpack(flat, (4, WIDTH), 1), flat)


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


@pytest.mark.parametrize("axis", [0, 1, None])
@pytest.mark.parametrize("shape", [(5, 70), (70, 5), (1, 1), (3, 0), (0, 40), (64, 96)])
def test_strips_are_the_bytes_of_the_panels(
    shape: tuple[int, int], axis: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of panels that are joined at a time does not matter."""
    matrix = np.arange(shape[0] * shape[1], dtype=np.float32).reshape(shape).astype(BF16)
    expected = (matrix if axis is None else pack(matrix, axis)).tobytes()
    for size in (1, 4 << 20):
        monkeypatch.setattr(panels, "_STRIP", size)
        assert b"".join(strips(matrix, axis)) == expected


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shape", [(5, 70), (70, 5), (97, 40), (1, 1), (3, 0)])
def test_any_range_of_rows_equals_that_of_the_matrix(shape: tuple[int, int], axis: int) -> None:
    matrix = np.arange(shape[0] * shape[1], dtype=np.float32).reshape(shape)
    flat = pack(matrix, axis)
    for start in range(shape[0]):
        for stop in range(start, shape[0] + 1):
            np.testing.assert_array_equal(panels.rows(flat, shape, axis, start, stop), matrix[start:stop])
