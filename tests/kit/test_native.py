"""The compiled loops give the same bits as numpy and ml_dtypes for any input."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from bf16kit.numerics import native, residual
from bf16kit.numerics import rounding as numerics
from bf16kit.numerics.native import Loops

pytestmark = pytest.mark.skipif(not native.LIBRARY.exists(), reason="the kernel was not built: no C++17 compiler")

Words = NDArray[np.uint32]
WORDS = arrays(np.uint32, st.integers(0, 300), elements=st.integers(0, 2**32 - 1))
FINITE = (0, 1, 0x7FFF, 0x8000, 0x8001, 0x007F8000, 0x00800000, 0x3F808000, 0x3F818000, 0x7F7F7FFF, 0x7F7F8000)
SPECIAL = np.array((*FINITE, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FFFFFFF), np.uint32)


@pytest.fixture(scope="module")
def loops() -> Loops:
    """Return the compiled loops. A library that is too old to have them fails the tests: build it again."""
    found = native.loops()
    assert found is not None
    return found


@pytest.fixture(scope="module")
def patterns() -> Words:
    """Return ten million patterns: random, special, and every upper half with each lower half at a rounding limit."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    neighbours = [upper | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    random = np.random.default_rng(0).integers(0, 1 << 32, 10_000_000, np.uint32)
    return np.concatenate([SPECIAL, SPECIAL | 0x80000000, *neighbours, random])


def rounded(words: Words) -> NDArray[np.uint16]:
    with np.errstate(all="ignore"):
        return words.view(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)


def test_rounding_equals_ml_dtypes_on_ten_million_patterns(loops: Loops, patterns: Words) -> None:
    out = np.empty(patterns.size, np.uint16)
    loops.round(patterns, out)
    np.testing.assert_array_equal(out, rounded(patterns))


@given(WORDS, st.integers(0, 9))
def test_rounding_writes_only_into_its_output(words: Words, shift: int) -> None:
    """For any length and any alignment within a vector, nothing before or after the output changes."""
    found = native.loops()
    assert found is not None
    from_here = np.concatenate([np.zeros(shift, np.uint32), words])[shift:]
    room = np.full(words.size + shift + 20, 0xABCD, np.uint16)
    found.round(from_here, room[shift : shift + words.size])
    np.testing.assert_array_equal(room[shift : shift + words.size], rounded(words))
    assert (room[:shift] == 0xABCD).all()
    assert (room[shift + words.size :] == 0xABCD).all()


def test_joining_reverses_parting_except_for_the_odd_elements(loops: Loops, patterns: Words) -> None:
    stored = rounded(patterns)
    low, odd = loops.part(patterns, stored)
    joined = np.empty_like(patterns)
    loops.join(stored, low, joined)
    np.testing.assert_array_equal(np.flatnonzero(joined != patterns), odd)
    predicted = stored.astype(np.uint32) << np.uint32(16)
    np.testing.assert_array_equal(low, (patterns - predicted).astype(np.uint16))
    np.testing.assert_array_equal(joined, residual._near(predicted, low))


def _stored(words: Words) -> numerics.Bf16Array:
    """Return bf16 values that are unrelated to ``words``."""
    return words[::-1].astype(np.uint16).view(numerics.BF16)


WITH_AND_WITHOUT: dict[str, Callable[[Words], object]] = {
    "to_bf16": lambda words: numerics.to_bf16(words.view(np.float32)).tobytes(),
    "census": lambda words: numerics.census(words.view(np.float32)),
    "encode": lambda words: residual.encode(words.view(np.float32), rounded(words).view(numerics.BF16)),
    "encode another": lambda words: residual.encode(words.view(np.float32), _stored(words)),
    "decode": lambda words: residual.decode(
        residual.encode(words.view(np.float32), _stored(words)), _stored(words)
    ).tobytes(),
}


@pytest.mark.parametrize("what", WITH_AND_WITHOUT)
def test_results_are_the_same_without_the_library(patterns: Words, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = WITH_AND_WITHOUT[what]
    compiled = compute(patterns)
    monkeypatch.setattr(numerics, "loops", lambda: None)
    monkeypatch.setattr(residual, "loops", lambda: None)
    assert compute(patterns) == compiled


@pytest.mark.parametrize("words", [SPECIAL[:0], SPECIAL[:1], SPECIAL[-3:]], ids=["none", "zero", "NaN"])
def test_the_census_of_empty_zero_and_nan_is_the_same_without_the_library(
    words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = numerics.census(words.view(np.float32))
    monkeypatch.setattr(numerics, "loops", lambda: None)
    assert numerics.census(words.view(np.float32)) == compiled


def test_a_tensor_at_an_odd_address_is_rounded_too() -> None:
    """A safetensors file may store its first tensor at any byte."""
    words = np.random.default_rng(0).integers(0, 1 << 32, 1000, np.uint32)
    shifted = np.frombuffer(b"x" + words.tobytes(), np.uint8)[1:].view(np.float32)
    assert not shifted.flags.aligned
    assert numerics.to_bf16(shifted).view(np.uint16).tobytes() == rounded(words).tobytes()
    assert numerics.census(shifted) == numerics.census(words.view(np.float32))
    encoded = residual.encode(shifted, rounded(words).view(numerics.BF16))
    moved = memoryview(b"x" + encoded)[1:]
    assert residual.decode(moved, rounded(words).view(numerics.BF16)).tobytes() == words.tobytes()


def test_a_missing_damaged_or_foreign_library_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "damaged.so").write_bytes(b"not a library")
    for library in (tmp_path / "absent.so", tmp_path / "damaged.so", Path("libc.so.6")):
        monkeypatch.setattr(native, "LIBRARY", library)
        native.loops.cache_clear()
        assert native.loops() is None
    monkeypatch.undo()
    native.loops.cache_clear()
    assert native.loops() is not None
