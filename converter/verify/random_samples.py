"""Seeded random samples for a model that has none: integers stay within the tables that they index.

The sizes of free dimensions are not known for a given model. So a few plausible sizes are tried on the source: images
of several sizes, sequences, and one row for models that keep a state of one row. The first sizes that it runs on are
used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from bf16kit.messages.errors import RuntimeFailure
from bf16kit.numerics.tensors import BY_NAME, TensorSpec
from converter.graph.indexing import Rows, compared_with, index_bounds
from converter.source import Array, Feeds
from converter.verify.samples import Samples

if TYPE_CHECKING:
    import onnx_ir as ir

    from converter.source import Sampler

COUNT = 8  # feeds
ROWS = 2  # size of the first named dimension: two, so that batching can be tested
_FEEDS_PER_ATTEMPT = 2  # feeds per attempt: sizes that do not run fail at once
_DEFAULT_BOUND = 2  # for an integer that indexes no known table: a flag or a mask

RunSource = Callable[[Sequence[Feeds]], Iterator[Feeds]]  # yields the outputs for each feed


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The sizes of free dimensions in one attempt: the first one, the later ones, and the size of images."""

    rows: int = ROWS
    lengths: tuple[int, int] = (4, 32)
    image: tuple[int, int] = (64, 64)


# Multiples of 32, for networks with five halvings; 48 × 192 is a line of text; 576 samples are a window of audio.
_ATTEMPTS = (
    _Sizes(),
    _Sizes(rows=1),
    _Sizes(image=(224, 224), lengths=(128, 160)),
    _Sizes(image=(48, 192), lengths=(576, 576)),
    _Sizes(rows=1, image=(224, 224), lengths=(576, 576)),
    _Sizes(rows=1, lengths=(1, 1), image=(320, 320)),
)


def generate(
    inputs: Sequence[TensorSpec],
    graph: ir.Model | None,
    sampler: Sampler | None,
    seed: int,
    run_source: RunSource | None = None,
) -> Samples:
    """Return :data:`COUNT` feeds: from ``sampler`` if given, else random within the bounds found in ``graph``.

    ``run_source`` runs the source on feeds; it is None if the source cannot run. If the source runs on none of the
    sizes, the first sizes are used. The next step that runs the model then reports what is wrong.
    """
    if sampler is not None:
        is_text = any(spec.name == "input_ids" for spec in inputs)
        description = "random token sequences" if is_text else "random inputs of the kind that the model takes"
        return Samples(tuple(sampler(seed, COUNT)), f"{description} (seed {seed})")
    origin = f"random inputs (seed {seed})"
    ranges = {} if graph is None else {value.name or "": _IntegerRange.of(value) for value in graph.graph.inputs}
    free = any(isinstance(dim, str) for spec in inputs for dim in spec.shape)
    for sizes in _ATTEMPTS if free and run_source is not None else ():
        feeds = _random(inputs, ranges, seed, sizes)
        tried = tuple(islice(feeds, _FEEDS_PER_ATTEMPT))  # the others are made on demand: an input may be wide
        if _can_run(run_source, tried):
            return Samples(_with_padding((*tried, *feeds), inputs, ranges, seed, run_source), origin)
        if sizes is _ATTEMPTS[0] and not _can_run(run_source, ()):
            break  # it cannot even be loaded, so no sizes would help
    found = tuple(_random(inputs, ranges, seed, _ATTEMPTS[0]))
    return Samples(found if free else _with_padding(found, inputs, ranges, seed, run_source), origin)


def _can_run(run_source: RunSource | None, feeds: Sequence[Feeds]) -> bool:
    try:
        deque(run_source(feeds) if run_source is not None else (), maxlen=0)
    except RuntimeFailure:
        return False
    return True


@dataclass(frozen=True, slots=True)
class _IntegerRange:
    """What the graph tells about an integer input: the ``tables`` that it indexes, by their size or its name, and the
    numbers that it is ``compared`` with for equality."""

    tables: frozenset[Rows] = frozenset()
    compared: tuple[int, ...] = ()

    @classmethod
    def of(cls, value: ir.Value) -> _IntegerRange:
        return cls(index_bounds(value), compared_with(value))

    def bound(self, chosen: Mapping[str, int]) -> int | None:
        """Return the size of the smallest table; None if no size is known."""
        sizes = (rows if isinstance(rows, int) else chosen.get(rows) for rows in self.tables)
        return min((size for size in sizes if size is not None), default=None)


def _with_padding(
    feeds: Sequence[Feeds],
    inputs: Sequence[TensorSpec],
    ranges: Mapping[str, _IntegerRange],
    seed: int,
    run_source: RunSource | None,
) -> tuple[Feeds, ...]:
    """Return ``feeds`` with padded rows in all but the first, so that what the model does with padding is measured.

    A feed stays as it is if the source fails on its variant or gives NaN, as for a row that is nothing but padding.
    """
    random = np.random.default_rng([seed, 1])
    variants = [
        {s.name: _pad(s, f[s.name], ranges.get(s.name, _IntegerRange()), random) for s in inputs} for f in feeds
    ]
    if run_source is None or all(
        array is feed[name] for feed, v in zip(feeds, variants, strict=True) for name, array in v.items()
    ):
        return tuple(feeds)
    kept = [feeds[0]]
    while len(kept) < len(feeds):
        try:
            for outputs in run_source(variants[len(kept) :]):
                kept.append((feeds if _has_nan(outputs) else variants)[len(kept)])
        except RuntimeFailure:
            kept.append(feeds[len(kept)])
    return tuple(kept)


def _has_nan(outputs: Feeds) -> bool:
    return any(array.dtype.kind == "f" and bool(np.isnan(array).any()) for array in outputs.values())


def _pad(spec: TensorSpec, array: Array, allowed: _IntegerRange, random: np.random.Generator) -> Array:
    """Return ``array`` with rows that end in zeros if it is a mask, or in a number that the graph compares it with.

    Each row keeps at least its first value, and any other array is returned itself.
    """
    if array.dtype.kind not in "iub" or array.ndim == 0 or array.shape[-1] < 2:
        return array
    if _is_mask(spec):
        end = 0
    elif not allowed.compared:
        return array
    elif allowed.tables:
        end = int(random.choice(allowed.compared))
    else:  # then the row's values are those numbers
        end = 0 if 0 not in allowed.compared else max(allowed.compared) + 1
    lengths = random.integers(1, array.shape[-1] + 1, (*array.shape[:-1], 1))
    return np.where(np.arange(array.shape[-1]) < lengths, array, end).astype(array.dtype)


def _is_mask(spec: TensorSpec) -> bool:
    return "mask" in spec.name.lower()


def _random(
    inputs: Sequence[TensorSpec], ranges: Mapping[str, _IntegerRange], seed: int, sizes: _Sizes
) -> Iterator[Feeds]:
    """Yield feeds without padding."""
    random = np.random.default_rng(seed)
    indexed = frozenset(rows for found in ranges.values() for rows in found.tables if isinstance(rows, str))
    for _ in range(COUNT):
        chosen = _choose(inputs, sizes, indexed, random)
        yield {spec.name: _values(spec, chosen, ranges.get(spec.name, _IntegerRange()), random) for spec in inputs}


def _choose(
    inputs: Sequence[TensorSpec], sizes: _Sizes, indexed: Collection[str], random: np.random.Generator
) -> dict[str, int]:
    """Return the size of each named dimension. A first dimension is that of the rows, unless an input indexes it."""
    chosen: dict[str, int] = {}
    for spec in inputs:
        for axis, dim in enumerate(spec.shape):
            if isinstance(dim, int) or dim in chosen:
                continue
            if axis == 0 and dim not in indexed:
                chosen[dim] = sizes.rows
            elif len(spec.shape) >= 4:
                chosen[dim] = sizes.image[0 if axis < _width(spec) else 1]
            else:
                chosen[dim] = int(random.integers(sizes.lengths[0], sizes.lengths[1] + 1))
    return chosen


def _width(spec: TensorSpec) -> int:
    """Return the axis that is an image's width: the last, or the one before the colours."""
    return len(spec.shape) - (2 if spec.shape[-1] in (1, 3, 4) else 1)


def _values(spec: TensorSpec, chosen: Mapping[str, int], allowed: _IntegerRange, random: np.random.Generator) -> Array:
    shape = tuple(dim if isinstance(dim, int) else chosen[dim] for dim in spec.shape)
    dtype = BY_NAME[spec.dtype].numpy
    if dtype.kind == "b" and not _is_mask(spec):
        return random.integers(0, 2, shape).astype(dtype)
    if dtype.kind in "iub":
        return _integers(spec, shape, allowed, allowed.bound(chosen), random).astype(dtype)
    if dtype.kind == "O":
        return np.full(shape, b"sample", dtype)
    return random.standard_normal(shape).astype(dtype)


def _integers(
    spec: TensorSpec, shape: tuple[int, ...], allowed: _IntegerRange, bound: int | None, random: np.random.Generator
) -> Array:
    dtype = BY_NAME[spec.dtype].numpy
    if _is_mask(spec):
        return np.ones(shape, dtype)
    if allowed.compared and bound is None:
        return random.choice(allowed.compared, shape)
    is_image = dtype == np.uint8 and len(shape) >= 3 and bound is None
    values = random.integers(0, 256 if is_image else min(bound or _DEFAULT_BOUND, np.iinfo(dtype).max), shape)
    others = np.setdiff1d(np.arange(bound or 0), allowed.compared) if allowed.compared else np.empty(0)
    return np.where(np.isin(values, allowed.compared), random.choice(others, shape), values) if others.size else values
