"""Packing the bits of a low half that can differ from zero, and the residual that results."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bf16kit.messages.errors import ArtifactDamaged
from bf16kit.numerics import residualparts
from bf16kit.numerics.residual import Encoder, decode
from bf16kit.numerics.rounding import to_bf16


@given(st.integers(0, 15), st.integers(0, 70), st.integers(0, 2**32 - 1))
def test_unpacking_restores_what_was_packed(count: int, elements: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    low = (random.integers(0, 1 << count, elements) << (16 - count)).astype(np.uint16)
    packed = residualparts.pack_bits(low, count)
    assert len(packed) == residualparts.packed_size(elements, count)
    np.testing.assert_array_equal(residualparts.unpack_bits(memoryview(packed), elements, count), low)


def test_a_group_is_stored_as_bit_planes_from_the_lowest_kept_bit() -> None:
    low = np.array([0x2000, 0x4000, 0x8000, 0xE000, 0, 0, 0, 0, 0x2000], np.uint16)
    assert residualparts.pack_bits(low, 3) == bytes([0b1001, 0b1010, 0b1100, 1, 0, 0])


def test_a_bit_that_would_be_lost_is_rejected() -> None:
    with pytest.raises(ValueError, match="more than 3 bits"):
        residualparts.pack_bits(np.array([0x1000], np.uint16), 3)


@pytest.mark.parametrize(("dtype", "most"), [("float16", 2.45), ("bfloat16", 2.01)])
def test_numbers_from_a_narrower_dtype_are_restored_from_few_bytes(dtype: str, most: float) -> None:
    """Cover all 65,536 patterns, with infinities, NaNs and subnormals, in blocks that are no multiple of eight."""
    source = np.arange(1 << 16, dtype=np.uint16).view(np.float16 if dtype == "float16" else ml_dtypes.bfloat16)
    source = np.random.default_rng(0).permutation(source)
    fp32 = source.astype(np.float32)
    bf16 = to_bf16(fp32)
    encoder = Encoder(fp32.shape, low_bits=residualparts.bits_needed(dtype))
    cuts = [0, 5, 12, 4099, fp32.size]
    pieces = [p for a, b in itertools.pairwise(cuts) for p in encoder.rows(fp32[a:b], bf16[a:b])]
    segment = b"".join([*map(bytes, pieces), *encoder.finish()])
    np.testing.assert_array_equal(decode(segment, bf16).view(np.uint32), fp32.view(np.uint32))
    finite = np.isfinite(fp32) & (np.abs(fp32) < 65504)
    assert (bf16.nbytes + len(segment)) / fp32.size <= most + 12 * (~finite).mean()
    damaged = segment[:-8] + bytes([17]) + segment[-7:]
    with pytest.raises(ArtifactDamaged):
        decode(damaged, bf16)
