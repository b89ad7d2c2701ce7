"""Finds equal tensors among many, bit for bit, also if one is the other's transpose.

Exporters copy weights: a Linear's weight may be transposed and unnamed, and tied embeddings are written twice. Equality
is exact: candidates are found by a fingerprint of a few elements, then compared bit by bit, a block of rows at a time.
"""

from __future__ import annotations

import numpy as np

from bf16kit.numerics.tensors import Array as Array

_ROWS_BYTES = 1 << 22
_PROBES = 64
OTHER_FLOATS = ("float16", "bfloat16", "float64")  # fp32 graphs are made from checkpoints in these dtypes too

Fingerprint = tuple[str, tuple[int, ...], bytes]


def fingerprint(array: Array, *, as_fp32: bool = False) -> Fingerprint:
    """Return dtype, shape and up to 64 elements spread over ``array``: equal for equal tensors, cheap for large ones.

    With ``as_fp32``, return the fingerprint of ``array`` in fp32. The strides of the elements avoid that all fall into
    one column; transposed views cost no copy.
    """
    count = min(_PROBES, array.size)
    flat = (np.arange(count, dtype=np.int64) * (array.size // max(count, 1)) + np.arange(count)) % max(array.size, 1)
    picked = array[np.unravel_index(flat, array.shape)] if array.size and array.ndim else array.reshape(-1)
    picked = in_fp32(picked) if as_fp32 else picked
    return picked.dtype.str + picked.dtype.name, array.shape, np.ascontiguousarray(picked).tobytes()


def in_fp32(array: Array) -> Array:
    """Return ``array`` in fp32, as torch and other readers of checkpoints convert it: exact from fp16 and bf16."""
    with np.errstate(over="ignore"):  # the reader of an fp64 checkpoint has checked its range already
        return array.astype(np.float32)


def same_bits(a: Array, b: Array, *, as_fp32: bool = False) -> bool:
    """Whether two arrays have the same dtype, shape and bits (NaN equals itself, 0 differs from −0).

    With ``as_fp32``, compare ``a`` in fp32 with ``b``.
    """
    if a.shape != b.shape or (np.dtype(np.float32) if as_fp32 else a.dtype) != b.dtype:
        return False
    if a.dtype == np.object_:
        return bool(np.array_equal(a, b))
    if a.ndim == 0:
        a, b = a.reshape(1), b.reshape(1)
    rows = max(1, _ROWS_BYTES // max(1, b.nbytes // max(1, len(b))))
    bits = np.dtype(f"u{b.dtype.itemsize}") if b.dtype.itemsize in (1, 2, 4, 8) else b.dtype
    blocks = ((a[start : start + rows], b[start : start + rows]) for start in range(0, len(b), rows))
    return all(
        np.array_equal((in_fp32(left) if as_fp32 else left).view(bits), right.view(bits)) for left, right in blocks
    )
