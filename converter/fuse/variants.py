"""Inputs on which fusions are compared: samples, and variants of one with other masks and other sizes.

Samples rarely hide anything: tokenizers pad only batches, and generated masks are all ones. Masks are where fusions
differ most.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from bf16kit.numerics.tensors import TensorSpec
from converter.source import Array, Feeds

_SAMPLES = 2  # taken as they are; a fusion computes the same for all
_SEED = 0


def variants(inputs: Sequence[TensorSpec], feeds: Sequence[Feeds]) -> Iterator[Feeds]:
    """Yield some of ``feeds`` as they are, then the largest with other masks, then it with dimensions cut to odd sizes
    and to 1.

    An input of integers or booleans whose values are 0 and 1 only is taken for a mask. Sizes are cut by the names of
    ``inputs``. The model may refuse a variant.
    """
    yield from feeds[:_SAMPLES]
    if not feeds:
        return
    largest = max(feeds, key=lambda feed: sum(array.size for array in feed.values()))
    masks = [name for name in largest if all(_is_mask(feed[name]) for feed in feeds)]
    drawn = np.random.default_rng(_SEED)
    cut = list(_cuts(inputs, largest))
    for feed in [largest, *cut[:1]] if masks else []:
        yield feed | {name: drawn.integers(0, 2, feed[name].shape).astype(feed[name].dtype) for name in masks}
        yield from _hidden(feed, masks)
    yield from cut


def _hidden(feed: Feeds, masks: Sequence[str]) -> Iterator[Feeds]:
    """Yield ``feed`` with padding on the left, padding on the right, and nothing but padding."""
    for padded in (lambda n: slice(0, n // 2), lambda n: slice(n - n // 2, n), lambda n: slice(0, n)):
        changed = {name: np.ones_like(feed[name]) for name in masks}
        for array in changed.values():
            array[..., padded(array.shape[-1])] = 0
        yield feed | changed


def _is_mask(array: Array) -> bool:
    return array.ndim > 0 and array.dtype.kind in "biu" and bool(np.isin(array, (0, 1)).all())


def _cuts(inputs: Sequence[TensorSpec], feed: Feeds) -> Iterator[Feeds]:
    """Yield ``feed`` with all free dimensions cut to odd sizes, then with each of them cut to 1."""
    found: dict[str, set[int]] = {}
    for spec in inputs:
        for dim, size in zip(spec.shape, feed[spec.name].shape, strict=True):
            if isinstance(dim, str):
                found.setdefault(dim, set()).add(size)
    sizes = {dim: next(iter(every)) for dim, every in found.items() if len(every) == 1}
    odd = {dim: size - 1 - size % 2 for dim, size in sizes.items() if size > 2}
    if odd:
        yield _cut(inputs, feed, odd)
    for dim, size in sizes.items():
        if size > 1:
            yield _cut(inputs, feed, {dim: 1})


def _cut(inputs: Sequence[TensorSpec], feed: Feeds, sizes: Mapping[str, int]) -> Feeds:
    return {
        spec.name: feed[spec.name][tuple(slice(sizes.get(dim) if isinstance(dim, str) else None) for dim in spec.shape)]
        for spec in inputs
    }
