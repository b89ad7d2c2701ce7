"""The worst slice of an output: each index along each axis, by its error against its own variation over the samples."""

import math
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from bf16kit.drift.metrics import compare
from bf16kit.drift.slices import FEWEST, GROUPS, SliceError, SliceSums, Variation, worst_slices
from bf16kit.numerics.tensors import TensorSpec

Array = NDArray[np.float64]


def measured(
    pairs: Iterable[tuple[Array, Array]], shape: tuple[int | str, ...], decay: float = 1.0
) -> tuple[SliceSums, Variation]:
    """Return the sums over ``pairs`` of reference and candidate, each of which makes the older ones count less."""
    spec = TensorSpec("y", "float32", shape)
    variation, noise = Variation(spec, 0), SliceSums(spec, 0)
    for r, c in pairs:
        for sums in (variation, noise):
            sums.scale(decay)
        found = compare(r, c, spec, 0, variation=variation)
        assert found.noise is not None
        noise.merge(found.noise)
    return noise, variation


def worst(found: tuple[SliceSums, Variation], most: int = 1) -> list[SliceError]:
    return worst_slices(found[0], found[1].scales(), most)


def judge(r: Array, c: Array, *, parts: int = 1) -> SliceError:
    """Judge ``c``, given in ``parts`` along the batch axis, as a conversion does."""
    pairs = zip(np.array_split(r, parts), np.array_split(c, parts), strict=True)
    (found,) = worst(measured(pairs, ("n", *r.shape[1:])))
    return found


def by_definition(r: Array, c: Array, axis: int) -> Array:
    """Return each slice's error along ``axis``, after the definition: one slice, one difference at a time."""
    found = []
    for i in range(r.shape[axis]):
        a, b = np.take(r, i, axis), np.take(c, i, axis)
        variation = np.mean([0.5 * np.mean((a[k + 1] - a[k]) ** 2) for k in range(len(a) - 1)])
        found.append(math.sqrt(np.mean((b - a) ** 2) / variation))
    return np.array(found)


def signal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("shape", [(20, 5), (20, 3, 7), (20, 2, 3, 4)])
@pytest.mark.parametrize("parts", [1, 3, 20])
def test_the_worst_slice_follows_the_definition(shape: tuple[int, ...], parts: int) -> None:
    r = signal(*shape)
    c = r + 0.1 * signal(*shape, seed=1) * np.linspace(1, 2, shape[1]).reshape(-1, *[1] * (len(shape) - 2))
    found = judge(r, c, parts=parts)
    expected = {axis: by_definition(r, c, axis) for axis in range(1, len(shape))}
    largest = max(expected, key=lambda axis: expected[axis].max())
    assert (found.axis, found.index) == (largest, int(expected[largest].argmax()))
    assert found.error == pytest.approx(expected[largest].max())
    assert (found.judged, found.slices) == (sum(shape[1:]), sum(shape[1:]))


def test_a_destroyed_channel_beside_a_large_one_is_found() -> None:
    """Boxes from 0 to 640 beside class scores of a thousandth: a norm sees nothing."""
    r = signal(16, 50, 85)
    r[..., :4] = 320 + 200 * r[..., :4]
    r[..., 4:] *= 1e-3
    c = r + 2e-3 * r.std(axis=0) * signal(*r.shape, seed=1)
    sound, destroyed = judge(r, c), judge(r, np.concatenate([c[..., :44], c[..., :43:-1]], axis=-1))
    assert sound.error < 0.01
    assert destroyed.error > 1
    assert destroyed.axis == 2
    assert destroyed.index >= 44


@pytest.mark.parametrize("error", [0.001, 1.0])
def test_a_token_beside_one_with_outliers_is_judged_by_itself(error: float) -> None:
    r = signal(16, 12, 32)
    r[:, 0] *= 1e4
    c = r * (1 + 1e-3)
    c[:, 5] += error * signal(16, 32, seed=1)
    found = judge(r, c)
    assert found.error == pytest.approx(max(error, 0.002), rel=0.5)


def test_a_constant_slice_is_judged_by_its_relative_error_and_a_zero_one_not_at_all() -> None:
    r = signal(16, 4)
    r[:, 1], r[:, 2] = 5.0, 0.0
    c = r.copy()
    c[:, 1:3] += 0.5
    found = judge(r, c)
    assert (found.axis, found.index, found.judged, found.slices) == (1, 1, 3, 4)
    assert found.error == pytest.approx(0.1)
    r = signal(FEWEST + 1, 3)  # with a sample less, nothing is judged
    assert worst(measured([(r, -r)], ("n", 3)))
    assert worst(measured([(r[1:], -r[1:])], ("n", 3))) == []


@pytest.mark.parametrize("largest", [0.5, 1.0, 2.0])
def test_tiny_values_are_named_beside_values_above_one_alone(largest: float) -> None:
    """Probabilities up to 1, which a certain class has, share a unit: one of 1e-9 is as good as none."""
    r = np.stack([np.full(32, largest), 1e-9 * np.abs(signal(32))], axis=1)
    r[:16, 0] = 1
    tiny = measured([(r[:16], r[:16]), (r[16:], r[16:])], ("n", 2))[1].scales(tiny=True)[0]
    assert np.isfinite(tiny).tolist() == [False, largest > 1]


def test_samples_may_differ_in_length() -> None:
    """Index 5 along the tokens exists in some sentences only."""
    pairs = []
    for seed in range(20):
        r = signal(1, 4 + seed % 5, 8, seed=seed)
        c = r + 0.01 * signal(*r.shape, seed=seed + 100)
        c[:, 5:6] += 1
        pairs.append((r, c))
    (found,) = worst(measured(pairs, ("n", "tokens", 8)))
    assert (found.axis, found.index) == (1, 5)
    assert found.error > 0.5


def test_the_worst_slices_come_in_order() -> None:
    r = signal(40, 6, 5)
    c = r + 0.01 * signal(*r.shape, seed=1)
    for place, size in ((4, 0.9), (1, 0.3), (3, 0.6)):
        c[:, :, place] += size * signal(40, 6, seed=place + 2)
    sums = measured([(r, c)], ("n", 6, 5))
    found = worst(sums, 3)
    assert [each.error for each in found] == sorted((each.error for each in found), reverse=True)
    assert (found[0].axis, found[0].index) == (2, 4)
    assert [found[0]] == worst(sums)
    assert len(worst(sums, 1000)) == 11


def test_a_long_axis_is_judged_in_groups_of_neighbours_and_no_axis_as_one_slice() -> None:
    size = 3 * GROUPS + 1
    r = signal(16, size)
    c = r.copy()
    c[:, 9000] += 3
    found = judge(r, c)
    assert found.index <= 9000 < found.index + 4
    assert found.error > 1
    r = signal(32)  # one number per sample is one slice
    found = judge(1000 + r, 1000 + r + 0.5 * signal(32, seed=1))
    assert found.slices == 1
    assert found.error == pytest.approx(0.5, rel=0.5)


def test_fills_and_infinities_vary_with_nothing() -> None:
    """A mask that moves between samples would look like a large variation."""
    r = signal(32, 10, 6)
    c = signal(32, 10, 6, seed=1)
    hidden = np.random.default_rng(2).random(r.shape) < 0.3
    for fill in (-1e9, -np.inf):
        r[hidden] = c[hidden] = fill
        found = judge(r, c)
        assert found.error > 1


@given(st.lists(st.floats(0.001, 10), min_size=3, max_size=3), st.integers(0, 100))
def test_the_measure_ignores_units_and_offsets_of_a_slice(factors: list[float], seed: int) -> None:
    r = signal(20, 3, seed=seed)
    c = r + 0.1 * signal(20, 3, seed=seed + 1)
    scale, offset = np.array(factors), np.array(factors[::-1])
    one, other = judge(r, c), judge(r * scale + offset, c * scale + offset)
    assert one.error == pytest.approx(other.error, rel=1e-6)


def test_older_samples_can_count_less() -> None:
    """Live sums decay: a slice that was mended is forgotten."""
    pairs = ((r, r + (1.0 if step < 100 else 0.01)) for step in range(200) for r in [signal(1, 4, seed=step)])
    (found,) = worst(measured(pairs, ("n", 4), decay=0.9))
    assert found.error < 0.1
