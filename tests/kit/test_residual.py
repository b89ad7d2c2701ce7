"""The residual restores every bit of any fp32 value."""

import contextlib
import itertools
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from loops import without_loops
from numpy.typing import NDArray

from bf16kit.messages.errors import ArtifactDamaged
from bf16kit.numerics.residual import Decoder, Encoder, Piece, Scale, bits_needed, encode_chunks
from bf16kit.numerics.rounding import BF16, Bf16Array, to_bf16

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


def encode(fp32: NDArray[np.float32], bf16: Bf16Array, scale: Scale | None = None) -> bytes:
    return b"".join(encode_chunks(fp32, bf16, scale))


def decode(segment: Piece, bf16: Bf16Array, scale: Scale | None = None) -> NDArray[np.float32]:
    restored = np.empty(bf16.shape, np.float32)
    Decoder(segment, bf16.shape, scale).rows(np.ascontiguousarray(bf16), restored)
    return restored


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

    def test_a_weight_takes_hardly_more_than_its_low_half(self) -> None:
        fp32 = np.random.default_rng(4).standard_normal(1 << 20).astype(np.float32)
        assert assert_restores(fp32, to_bf16(fp32)) < fp32.size / 1000
        assert encode(fp32, to_bf16(fp32))[: 2 * fp32.size] == fp32.view(np.uint16)[::2].tobytes()

    @pytest.mark.parametrize("shape", [(), (0, 4), (2, 3, 4)])
    def test_shapes_and_orders_are_restored(self, shape: tuple[int, ...]) -> None:
        fp32 = np.random.default_rng(5).standard_normal(shape).astype(np.float32).T
        assert_restores(fp32, to_bf16(fp32))


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


def test_a_group_is_stored_as_bit_planes_from_the_lowest_kept_bit_and_none_below_is_lost() -> None:
    words = np.array([0x2000, 0x4000, 0x8000, 0xE000, 0, 0, 0, 0, 0x2000], np.uint32)
    encoder = Encoder(words.shape, low_bits=3)
    pieces = [*encoder.rows(words.view(np.float32), np.zeros(9, BF16)), *encoder.finish()]
    assert b"".join(map(bytes, pieces))[:6] == bytes([0b1001, 0b1010, 0b1100, 1, 0, 0])
    encoder = Encoder((8,), low_bits=3)
    with pytest.raises(ValueError, match="more than 3 bits"):
        list(encoder.rows(np.full(8, 0x1000, np.uint32).view(np.float32), np.zeros(8, BF16)))


@pytest.mark.parametrize(("dtype", "most"), [("float16", 2.45), ("bfloat16", 2.01)])
def test_numbers_from_a_narrower_dtype_are_restored_from_few_bytes(dtype: str, most: float) -> None:
    """Cover all 65,536 patterns, with infinities, NaNs and subnormals, in blocks that are no multiple of eight."""
    source = np.arange(1 << 16, dtype=np.uint16).view(np.float16 if dtype == "float16" else ml_dtypes.bfloat16)
    source = np.random.default_rng(0).permutation(source)
    fp32 = source.astype(np.float32)
    bf16 = to_bf16(fp32)
    encoder = Encoder(fp32.shape, low_bits=bits_needed(dtype))
    cuts = [0, 5, 12, 4099, fp32.size]
    pieces = [p for a, b in itertools.pairwise(cuts) for p in encoder.rows(fp32[a:b], bf16[a:b])]
    segment = b"".join([*map(bytes, pieces), *encoder.finish()])
    np.testing.assert_array_equal(decode(segment, bf16).view(np.uint32), fp32.view(np.uint32))
    finite = np.isfinite(fp32) & (np.abs(fp32) < 65504)
    assert (bf16.nbytes + len(segment)) / fp32.size <= most + 12 * (~finite).mean()
    damaged = segment[:-8] + bytes([17]) + segment[-7:]
    with pytest.raises(ArtifactDamaged):
        decode(damaged, bf16)


@pytest.mark.parametrize("related", [True, False])
def test_the_compiled_loops_give_the_bits_of_numpy(related: bool) -> None:
    """Restore every tie and millions of bits, also from unrelated values, and from a segment at an odd address."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, 4_000_000, np.uint32)
    bits = np.concatenate([np.array(SPECIAL, np.uint32), (np.arange(1 << 16, dtype=np.uint32) << 16) | 0x8000, bits])
    fp32, bf16 = bits.view(np.float32), to_bf16(bits.view(np.float32)) if related else bits[::-1].astype(np.uint16)
    bf16 = bf16.view(BF16)
    segment = encode(fp32, bf16)
    assert decode(segment, bf16).tobytes() == bits.tobytes()
    assert decode(memoryview(b"x" + segment)[1:], bf16).tobytes() == bits.tobytes()
    with without_loops():
        assert encode(fp32, bf16) == segment
        assert decode(segment, bf16).tobytes() == bits.tobytes()
