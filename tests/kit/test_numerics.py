"""Rounding over whole domains: every bfloat16 value, every edge of fp32, millions of random bit patterns.

The compiled loops, where the kernel was built, and numpy must give the same bits.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from loops import without_loops
from numpy.typing import NDArray

from bf16kit.numerics import rounding as numerics
from bf16kit.numerics.rounding import (
    BF16,
    LARGEST,
    LOWEST,
    OVERFLOW,
    SMALLEST_NORMAL,
    UNIT_ROUNDOFF,
    Bf16Array,
    Census,
    census,
    to_bf16,
    to_fp32,
)

EVERY_BF16: Bf16Array = np.arange(1 << 16, dtype=np.uint16).view(BF16)
EDGES = np.array(
    [
        0x00000000,  # zero
        0x00000001,  # smallest fp32 subnormal
        0x00008000,  # 2**-134: a tie between zero and the smallest bf16 subnormal
        0x00008001,  # just above it
        0x007F7FFF,  # rounds to the largest subnormal
        0x007F8000,  # a tie between the largest subnormal and the smallest normal
        0x00800000,  # smallest normal
        0x3F800000,  # 1
        0x3F808000,  # a tie that rounds down to even
        0x3F818000,  # a tie that rounds up to even
        0x7F7F7FFF,  # the last that stays finite
        0x7F7F8000,  # the first that overflows
        0x7F7FFFFF,  # largest fp32
        0x7F800000,  # infinity
        0x7F800001,  # a signalling NaN whose payload rounding would remove
        0x7FC00000,  # the quiet NaN
        0x7FFFFFFF,  # a NaN that add-and-shift would turn into -0
    ],
    np.uint32,
)


def floats(bits: NDArray[np.uint32]) -> NDArray[np.float32]:
    return bits.view(np.float32)


def both_signs(bits: NDArray[np.uint32]) -> NDArray[np.uint32]:
    return np.concatenate([bits, bits | np.uint32(0x80000000)])


def random_bits(count: int, seed: int = 0) -> NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32)


def round_by_hand(bits: NDArray[np.uint32]) -> NDArray[np.uint16]:
    """Round to nearest even with integers, NaN tested first: an independent way to the same numbers."""
    wide = bits.astype(np.uint64)
    rounded = (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16
    is_nan = (wide & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, ((wide >> 16) & 0x8000) | 0x7FC0, rounded).astype(np.uint16)


def bf16_bits(x: Bf16Array) -> NDArray[np.uint16]:
    bits: NDArray[np.uint16] = x.view(np.uint16)
    return bits


@pytest.fixture(params=["compiled", "numpy"])
def loops(request: pytest.FixtureRequest) -> Iterator[None]:
    """Use the compiled loops, then numpy. A library that is too old to have them fails the tests: build it again."""
    if request.param == "numpy":
        with without_loops():
            yield
    elif numerics.LIBRARY.exists():
        assert numerics.loops() is not None
        yield
    else:
        pytest.skip("the kernel was not built: no C++17 compiler")


@pytest.mark.usefixtures("loops")
class TestRounding:
    def test_every_bfloat16_value_widens_exactly_and_rounds_back_to_itself(self) -> None:
        wide = to_fp32(EVERY_BF16)
        assert np.array_equal(wide.view(np.uint32), np.arange(1 << 16, dtype=np.uint32) << 16)
        number = ~np.isnan(wide)
        assert np.array_equal(bf16_bits(to_bf16(wide))[number], bf16_bits(EVERY_BF16)[number])

    def test_every_nan_stays_nan_and_keeps_its_sign(self) -> None:
        wide = to_fp32(EVERY_BF16)
        bits = bf16_bits(to_bf16(wide[np.isnan(wide)]))
        assert bits.size == 2 * 127
        assert set(bits.tolist()) == {0x7FC0, 0xFFC0}
        assert np.array_equal(bits >> 15, wide[np.isnan(wide)].view(np.uint32) >> 31)

    def test_random_bit_patterns_and_every_rounding_neighbourhood_round_as_ml_dtypes_and_as_integers_do(self) -> None:
        """Cover all high halves, each with the low halves on either side of each rounding decision."""
        low = np.array([0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
        near = ((np.arange(1 << 16, dtype=np.uint32) << np.uint32(16))[:, None] | low).reshape(-1)
        bits = np.concatenate([both_signs(EDGES), near, random_bits(1 << 22)])
        rounded = bf16_bits(to_bf16(floats(bits)))
        with np.errstate(all="ignore"):
            assert np.array_equal(rounded, bf16_bits(floats(bits).astype(ml_dtypes.bfloat16)))
        assert np.array_equal(rounded, round_by_hand(bits))

    def test_no_value_moves_by_more_than_half_an_ulp_and_constants_have_the_bits_that_their_names_say(self) -> None:
        x = floats(random_bits(1 << 18, seed=2))
        x = x[np.isfinite(x) & (np.abs(x) >= SMALLEST_NORMAL) & (np.abs(x) < OVERFLOW)].astype(np.float64)
        error = np.abs(to_fp32(to_bf16(x.astype(np.float32))) - x) / np.abs(x)
        assert error.max() <= UNIT_ROUNDOFF / (1 + UNIT_ROUNDOFF)
        bits = np.array([0x7F7F, 0xFF7F, 0x0080], np.uint16)
        assert bits.view(BF16).astype(np.float64).tolist() == [LARGEST, LOWEST, SMALLEST_NORMAL]
        assert np.float32(OVERFLOW).view(np.uint32) == 0x7F7F8000

    @pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (2, 3)])
    def test_shapes_are_kept_and_the_result_is_in_c_order(self, shape: tuple[int, ...]) -> None:
        x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape).T
        for rounded in (to_bf16(x), to_bf16(x, saturate=True)):
            assert rounded.flags.c_contiguous
            assert np.array_equal(to_fp32(rounded), x)

    def test_the_caller_may_give_the_output_array(self) -> None:
        x = np.arange(12, dtype=np.float32).reshape(3, 4)
        out = np.zeros((5, 4), BF16)
        assert to_bf16(x, out=out[1:4]).base is out
        np.testing.assert_array_equal(out.astype(np.float32), np.pad(x, ((1, 1), (0, 0))))
        for wrong in (out, out.T[:, :3], np.zeros((3, 4), np.float32)):
            with pytest.raises(ValueError, match="cannot round"):
                to_bf16(x, out=wrong)


class TestOptions:
    def test_flush_zeroes_exactly_the_subnormal_results_and_keeps_their_sign(self) -> None:
        x = floats(np.concatenate([both_signs(EDGES), random_bits(1 << 20) & np.uint32(0x80FFFFFF)]))
        kept, flushed = bf16_bits(to_bf16(x)), bf16_bits(to_bf16(x, subnormals="flush"))
        subnormal = ((kept & 0x7FFF) < 0x0080) & ((kept & 0x7FFF) > 0)
        assert subnormal.any()
        assert np.array_equal(flushed, np.where(subnormal, kept & 0x8000, kept))

    def test_flush_gives_what_cloud_tpu_documents_in_each_case(self) -> None:
        """The cases are in the table of docs/facts/numerics.md, which names their source."""
        page = (Path(__file__).parents[2] / "docs" / "facts" / "numerics.md").read_text()
        cases = re.findall(r"^\| 0x([0-9A-F]{8}) \| 0x([0-9A-F]{4}) \|", page, re.MULTILINE)
        assert len(cases) == 18
        x = floats(np.array([int(given, 16) for given, _ in cases], np.uint32))
        found = bf16_bits(to_bf16(x, subnormals="flush"))
        assert [f"{bits:04X}" for bits in found] == [expected for _, expected in cases]

    def test_saturate_makes_infinities_the_largest_finite_value_of_their_sign(self) -> None:
        x = floats(both_signs(EDGES))
        plain, saturated = bf16_bits(to_bf16(x)), bf16_bits(to_bf16(x, saturate=True))
        infinite = (plain & 0x7FFF) == 0x7F80
        assert infinite.sum() == 2 * 3
        assert np.array_equal(saturated, np.where(infinite, (plain & 0x8000) | 0x7F7F, plain))


@pytest.mark.usefixtures("loops")
class TestCensus:
    def test_counts_agree_with_the_results_of_rounding(self) -> None:
        bits = np.concatenate([both_signs(EDGES), random_bits(1 << 20), random_bits(1 << 16) & np.uint32(0x80FFFFFF)])
        x = floats(bits)
        y = to_bf16(x).astype(np.float64)
        finite = np.abs(x[np.isfinite(x)])
        assert census(x) == Census(
            count=x.size,
            nan=int(np.isnan(x).sum()),
            inf=int(np.isinf(x).sum()),
            overflow=int((np.isinf(y) & np.isfinite(x)).sum()),
            subnormal=int(((y != 0) & (np.abs(y) < SMALLEST_NORMAL)).sum()),
            flushed_to_zero=int(((y == 0) & (x != 0)).sum()),
            max_abs=float(finite.max()),
            min_abs_nonzero=float(finite[finite > 0].min()),
        )
        for values in ([], [0.0, -0.0], [np.nan, np.inf]):
            found = census(np.array(values, np.float32))
            assert (found.max_abs, found.min_abs_nonzero) == (0.0, 0.0)


@given(st.lists(st.floats(width=32), max_size=20), st.lists(st.floats(width=32), max_size=20))
def test_the_census_of_two_tensors_is_the_sum_of_theirs(a: list[float], b: list[float]) -> None:
    first, second = np.array(a, np.float32), np.array(b, np.float32)
    assert census(np.concatenate([first, second])) == census(first) + census(second)


@pytest.mark.skipif(not numerics.LIBRARY.exists(), reason="the kernel was not built: no C++17 compiler")
@given(arrays(np.uint32, st.integers(0, 300), elements=st.integers(0, 2**32 - 1)), st.integers(0, 9))
def test_the_compiled_loop_writes_only_into_its_output(words: NDArray[np.uint32], shift: int) -> None:
    """For any length and any alignment within a vector, nothing before or after the output changes."""
    found = numerics.loops()
    assert found is not None
    from_here = np.concatenate([np.zeros(shift, np.uint32), words])[shift:]
    room = np.full(words.size + shift + 20, 0xABCD, np.uint16)
    found.round(from_here, room[shift : shift + words.size])
    np.testing.assert_array_equal(room[shift : shift + words.size], round_by_hand(words))
    assert (room[:shift] == 0xABCD).all()
    assert (room[shift + words.size :] == 0xABCD).all()


def test_a_tensor_at_an_odd_address_is_rounded_too() -> None:
    """A safetensors file may store its first tensor at any byte."""
    words = random_bits(1000)
    shifted = np.frombuffer(b"x" + words.tobytes(), np.uint8)[1:].view(np.float32)
    assert not shifted.flags.aligned
    assert bf16_bits(to_bf16(shifted)).tobytes() == round_by_hand(words).tobytes()
    assert census(shifted) == census(floats(words))


@pytest.mark.parametrize("name", ["absent.so", "damaged.so", "libc.so.6"])
def test_a_missing_damaged_or_foreign_library_is_not_used(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "damaged.so").write_bytes(b"not a library")
    monkeypatch.setattr(numerics, "LIBRARY", Path(name) if name == "libc.so.6" else tmp_path / name)
    assert numerics.loops.__wrapped__() is None
