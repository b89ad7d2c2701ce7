"""Finding equal tensors among many, bit for bit, also when one is the other's transpose.

Exporters copy weights: a Linear's weight comes out transposed and nameless, tied embeddings come out twice. Equality is
exact: candidates are found by a fingerprint of a few elements, then compared bit by bit, a block of rows at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_ROWS_BYTES = 1 << 22
_PROBES = 64

Array = NDArray[Any]
Fingerprint = tuple[str, tuple[int, ...], bytes]


def fingerprint(array: Array) -> Fingerprint:
    """dtype, shape, and up to 64 elements spread over ``array``: equal for equal tensors, cheap for large ones.

    The probes lie at prime-ish strides so that they do not all fall into one column; transposed views cost no copy.
    """
    count = min(_PROBES, array.size)
    flat = (np.arange(count, dtype=np.int64) * (array.size // max(count, 1)) + np.arange(count)) % max(array.size, 1)
    picked = array[np.unravel_index(flat, array.shape)] if array.size and array.ndim else array.reshape(-1)
    return array.dtype.str + array.dtype.name, array.shape, np.ascontiguousarray(picked).tobytes()


def same_bits(a: Array, b: Array) -> bool:
    """Whether two arrays have the same dtype, shape and bits (NaN equals itself, 0 differs from −0)."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype == np.object_:
        return bool(np.array_equal(a, b))
    if a.ndim == 0:
        return a.tobytes() == b.tobytes()
    rows = max(1, _ROWS_BYTES // max(1, a.nbytes // max(1, len(a))))
    bits = np.dtype(f"u{a.dtype.itemsize}") if a.dtype.itemsize in (1, 2, 4, 8) else a.dtype
    return all(
        np.array_equal(a[start : start + rows].view(bits), b[start : start + rows].view(bits))
        for start in range(0, len(a), rows)
    )
