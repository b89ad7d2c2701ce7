"""The residual restores every bit of any fp32 value."""

from __future__ import annotations

import contextlib
import itertools
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from bf16kit.messages.errors import ArtifactDamaged
from bf16kit.numerics import residualparts
from bf16kit.numerics.residual import Encoder, Scale, decode, encode
from bf16kit.numerics.rounding import Bf16Array, to_bf16

SPECIAL = [
    0x00000000, 0x00000001, 0x00008000, 0x007FFFFF, 0x00800000, 0x3F808000, 0x3F818000, 0x7F7F7FFF, 0x7F7F8000,
    0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FC08000, 0x7FFFFFFF,
]  # fmt: skip

words = st.one_of(
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**16 - 1).map(lambda high: high << 16 | 0x8000),  # all are ties
    st.sampled_from(SPECIAL + [word | 0x80000000 for word in SPECIAL]),
)
bit_patterns = arrays.arrays(np.uint32, st.integers(0, 40), elements=words)
scales = st.floats(2.0**-20, 2.0**20, width=32).flatmap(lambda s: st.sampled_from([s, -s]))


def assert_restores(fp32: NDArray[np.float32], bf16: Bf16Array, scale: Scale | None = None) -> int:
    """Encode, decode and compare the bits. Return the size of the segment beyond two bytes an element."""
    segment = encode(fp32, bf16, scale)
    restored = decode(segment, bf16, scale)
    assert restored.shape == fp32.shape
    assert np.array_equal(restored.view(np.uint32), fp32.view(np.uint32))
    return len(segment) - 2 * fp32.size


def fold(fp32: NDArray[np.float32], scale: Scale) -> Bf16Array:
    """Multiply in float64 along the scale's axis, as folding BatchNorm does, then round."""
    shape = [1] * fp32.ndim
    shape[scale.axis] = -1
    with np.errstate(all="ignore"):
        return to_bf16((fp32.astype(np.float64) * scale.values.astype(np.float64).reshape(shape)).astype(np.float32))


class TestPlain:
    @given(bit_patterns, st.sampled_from(["keep", "flush"]), st.booleans())
    def test_any_bits_are_restored(self, bits: NDArray[np.uint32], subnormals: str, saturate: bool) -> None:
        fp32 = bits.view(np.float32)
        assert_restores(fp32, to_bf16(fp32, subnormals=subnormals, saturate=saturate))  # type: ignore[arg-type]

    def test_millions_of_random_bits_are_restored(self) -> None:
        fp32 = np.random.default_rng(0).integers(0, 1 << 32, 1 << 22, dtype=np.uint32).view(np.float32)
        assert_restores(fp32, to_bf16(fp32))

    def test_every_tie_of_every_exponent_is_restored(self) -> None:
        """Ties rounded up and ties rounded down leave the same low half: only the list distinguishes them."""
        ties = (np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)) | np.uint32(0x8000)
        assert_restores(ties.view(np.float32), to_bf16(ties.view(np.float32)))

    def test_fp32_is_restored_even_from_unrelated_bfloat16_values(self) -> None:
        """Values that were not rounded to nearest take more space, but no bit is lost."""
        bits = np.random.default_rng(1).integers(0, 1 << 32, 1000, dtype=np.uint32)
        unrelated = np.random.default_rng(2).integers(0, 1 << 16, 1000, dtype=np.uint16)
        assert_restores(bits.view(np.float32), unrelated.view(to_bf16(np.zeros(1, np.float32)).dtype))

    def test_the_low_half_is_stored_as_it_is(self) -> None:
        fp32 = np.random.default_rng(3).standard_normal(100).astype(np.float32)
        segment = encode(fp32, to_bf16(fp32))
        assert segment[:200] == fp32.view(np.uint16)[::2].tobytes()

    def test_weights_take_hardly_more_than_two_bytes_each(self) -> None:
        fp32 = np.random.default_rng(4).standard_normal(1 << 20).astype(np.float32)
        assert assert_restores(fp32, to_bf16(fp32)) < fp32.size / 1000

    @pytest.mark.parametrize("shape", [(), (0, 4), (2, 3, 4)])
    def test_shapes_are_restored(self, shape: tuple[int, ...]) -> None:
        fp32 = np.full(shape, 0.3, np.float32)
        assert_restores(fp32, to_bf16(fp32))

    def test_a_transposed_tensor_is_restored_in_its_own_order(self) -> None:
        fp32 = np.random.default_rng(5).standard_normal((5, 7)).astype(np.float32).T
        restored = decode(encode(fp32, to_bf16(fp32)), to_bf16(fp32))
        assert np.array_equal(restored, fp32)


class TestScaled:
    @given(bit_patterns, scales)
    def test_any_bits_are_restored_with_any_scale(self, bits: NDArray[np.uint32], value: float) -> None:
        fp32 = bits.view(np.float32).reshape(1, -1)
        scale = Scale(0, np.array([value], np.float32))
        assert_restores(fp32, fold(fp32, scale), scale)

    @pytest.mark.parametrize("axis", [0, 1, 2])
    def test_weights_are_restored_with_a_scale_along_any_axis(self, axis: int) -> None:
        rng = np.random.default_rng(axis)
        fp32 = rng.standard_normal((24, 36, 400)).astype(np.float32)  # more than one chunk
        scale = Scale(axis, 3 * rng.standard_normal((fp32.shape[axis],), np.float32))
        extra = assert_restores(fp32, fold(fp32, scale), scale)
        assert extra < 0.03 * fp32.nbytes

    @given(st.floats(1, 2, exclude_max=True, width=32))
    def test_the_worst_scales_stay_within_the_documented_size(self, value: float) -> None:
        """An artifact with residual is ≤ 1.03 × fp32, even if every weight had this scale folded in."""
        fp32 = np.random.default_rng(0).standard_normal((1, 1 << 15)).astype(np.float32)
        scale = Scale(0, np.array([value], np.float32))
        assert assert_restores(fp32, fold(fp32, scale), scale) < 0.03 * fp32.nbytes

    @pytest.mark.parametrize("values", [[0.0], [np.inf], [np.nan]])
    def test_a_scale_that_cannot_be_undone_is_rejected(self, values: list[float]) -> None:
        with pytest.raises(ValueError, match="cannot be undone"):
            Scale(0, np.array(values, np.float32))

    def test_a_scale_that_does_not_fit_is_rejected(self) -> None:
        fp32 = np.ones((2, 3), np.float32)
        with pytest.raises(ValueError, match="does not fit"):
            encode(fp32, to_bf16(fp32), Scale(0, np.ones(3, np.float32)))


class TestDamage:
    """A segment is checked before it is used: a damaged one raises an error and is never read beyond its end."""

    def segment(self) -> tuple[bytes, Bf16Array]:
        ties = ((np.arange(2000, dtype=np.uint32) << np.uint32(16)) | np.uint32(0x8000)).view(np.float32)
        fp32 = np.concatenate([ties, np.array([1e-40], np.float32)])
        bf16 = to_bf16(fp32, subnormals="flush")
        return encode(fp32, bf16), bf16

    def test_the_segment_of_another_tensor_is_rejected(self) -> None:
        segment, bf16 = self.segment()
        with pytest.raises(ArtifactDamaged, match="2001 elements"):
            decode(segment, bf16[1:])

    @given(st.data())
    def test_a_truncated_segment_is_rejected(self, data: st.DataObject) -> None:
        segment, bf16 = self.segment()
        cut = data.draw(st.integers(0, len(segment) - 1))
        with pytest.raises(ArtifactDamaged, match="residual"):
            decode(segment[:cut], bf16)

    @given(st.data())
    def test_changed_bytes_raise_an_error_or_decode_to_the_same_shape(self, data: st.DataObject) -> None:
        segment, bf16 = self.segment()
        at = data.draw(st.integers(0, len(segment) - 1))
        changed = bytearray(segment)
        changed[at] ^= data.draw(st.integers(1, 255))
        with contextlib.suppress(ArtifactDamaged):
            assert decode(bytes(changed), bf16).shape == bf16.shape

    def test_a_footer_of_huge_counts_is_rejected(self) -> None:
        segment, bf16 = self.segment()
        elements, _, _, form, magic = struct.unpack("<QQQB3x4s", segment[-32:])
        footer = struct.pack("<QQQB3x4s", elements, 2**64 - 1, 2**63, form, magic)
        with pytest.raises(ArtifactDamaged, match="footer says"):
            decode(segment[:-32] + footer, bf16)


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
