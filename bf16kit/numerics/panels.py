"""Panels: a weight matrix stored 32 columns at a time, so that each panel is read from its first byte to its last.

For one row of ``x``, a product ``x·M`` with ``M`` of ``[K, N]`` reads every column of a panel in one pass down ``K``.
In C order each step of that pass jumps ``2·N`` bytes; in panels none does (docs/decisions/0010-weights-in-panels.md).

``ceil(N / 32)`` panels lie one after the other, each ``[K, 32]`` in C order, the last ``[K, N mod 32]`` when 32 does
not divide ``N``. So nothing is padded, and ``M[k, n]`` is element ``32·K·p + k·w + n − 32·p`` with ``p = n div 32`` and
``w = min(32, N − 32·p)``. ``M`` is the matrix itself for axis 1 and its transpose for axis 0: the axis is the one that
holds the columns of the product.

A convolution's weight ``[N, C, …]`` is the matrix ``[N, K]`` along axis 0 whose rows have the window's channels last:
``K`` runs over ``[…, C]``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from bf16kit.numerics.tensors import Array as Array

WIDTH = 32  # columns: two registers of 16 fp32, and 64 bytes of bf16, a cache line, per step down K

STRIP = 4 << 20  # bytes of panels that are packed at a time


def pack(matrix: Array, axis: int) -> Array:
    """Pack ``matrix`` as panels along ``axis``: a new 1-D array. ValueError when it has no such axis."""
    columns = _columns(matrix, axis)
    panels = (columns[:, first : first + WIDTH].reshape(-1) for first in range(0, columns.shape[1], WIDTH))
    return np.concatenate([np.empty(0, matrix.dtype), *panels])


def strips(array: Array, axis: int | None) -> Iterator[memoryview]:
    """Yield the bytes of the C-contiguous ``array``, packed by :func:`pack`, a few panels at a time; for None as is."""
    if axis is None:
        yield array.reshape(-1).view(np.uint8).data
        return
    columns = _columns(array, axis)
    step = max(1, STRIP // max(1, columns[:, :WIDTH].nbytes)) * WIDTH
    for first in range(0, columns.shape[1], step):
        yield pack(columns[:, first : first + step], 1).view(np.uint8).data


def unpack(flat: Array, shape: Sequence[int], axis: int) -> Array:
    """Return the matrix of ``shape`` that was packed as ``flat``: a new array. ValueError if they do not fit."""
    _columns(np.empty(tuple(shape), np.uint8), axis)
    if flat.shape != (math.prod(shape),):
        raise ValueError(f"panels of {list(shape)} are {math.prod(shape)} elements in a row, got {list(flat.shape)}")
    return rows(flat, shape, axis, 0, shape[0])


def rows(flat: Array, shape: Sequence[int], axis: int, start: int, stop: int) -> Array:
    """Return rows ``start`` to ``stop`` of what :func:`unpack` gives, without unpacking the others."""
    columns = math.prod(shape[1:])
    block = np.empty((stop - start, columns), flat.dtype)
    height, width = shape if axis == 1 else (columns, shape[0])  # of the product's matrix
    begin, end = (0, width) if axis == 1 else (start, stop)
    for first in range(begin - begin % WIDTH, end, WIDTH):
        last = min(width, first + WIDTH)
        panel = flat[height * first : height * last].reshape(height, last - first)
        if axis == 1:
            block[:, first:last] = panel[start:stop]
        else:
            low, high = max(start, first), min(stop, last)
            block[low - start : high - start] = panel[:, low - first : high - first].T
    if len(shape) == 2:
        return block
    return np.ascontiguousarray(np.moveaxis(block.reshape(stop - start, *shape[2:], shape[1]), -1, 1))


def _columns(matrix: Array, axis: int) -> Array:
    """Return ``matrix`` as a ``[K, N]`` view."""
    if axis not in range(2 if matrix.ndim == 2 else min(1, matrix.ndim // 2)):
        raise ValueError(f"panels lie along axis 0 or 1 of a matrix, not along axis {axis} of {list(matrix.shape)}")
    return matrix if axis == 1 else np.moveaxis(matrix, 1, -1).reshape(len(matrix), math.prod(matrix.shape[1:])).T
