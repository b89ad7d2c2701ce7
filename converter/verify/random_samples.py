"""Makes samples: random ones for a model that has none, and more of the given ones where these are too few.

Both are seeded. Random integers stay within the tables that they index. The sizes of free dimensions are not known for
a given model. So a few plausible sizes are tried on the source: images of several sizes, sequences, and one row for
models that keep a state of one row. The first sizes that it runs on are used.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from bf16kit.converter.graph.indexing import Rows, compared_with, index_bounds
from bf16kit.converter.source import Array, Feeds, Oracle, Sampler
from bf16kit.converter.verify.observedshapes import may_have_batch_axis
from bf16kit.converter.verify.samples import Samples
from bf16kit.drift.budget import Budget
from bf16kit.drift.metrics import has_slices
from bf16kit.messages.errors import RuntimeFailure
from bf16kit.numerics.tensors import BY_NAME, TensorSpec

if TYPE_CHECKING:
    import onnx_ir as ir

COUNT = 8  # feeds
ROWS = 2  # size of the first named dimension: two, so that batching can be tested
_FEEDS_PER_ATTEMPT = 2  # feeds per attempt: sizes that do not run fail at once
_DEFAULT_BOUND = 2  # for an integer that indexes no known table: a flag or a mask
SAMPLES = 16  # to know how much a slice of an output varies
_STEP = 0.5  # of the difference of two other samples
_RELATIVE = 0.25  # of each element, where there are no others
_SMALLER = 0.1  # of these steps, where the source rejects the feeds that they give
_REPLACED = 0.25  # share of an integer input's elements

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
    values = {} if graph is None else {value.name or "": value for value in graph.graph.inputs}
    ranges = {spec.name: _IntegerRange.of(values.get(spec.name)) for spec in inputs}
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
    def of(cls, value: ir.Value | None) -> _IntegerRange:
        return cls() if value is None else cls(index_bounds(value), compared_with(value))

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
    variants = [{s.name: _pad(s, feed[s.name], ranges[s.name], random) for s in inputs} for feed in feeds]
    unpadded = all(array is feed[name] for feed, v in zip(feeds, variants, strict=True) for name, array in v.items())
    if run_source is None or unpadded:
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
        yield {spec.name: _values(spec, chosen, ranges[spec.name], random) for spec in inputs}


def _choose(
    inputs: Sequence[TensorSpec], sizes: _Sizes, indexed: Collection[str], random: np.random.Generator
) -> dict[str, int]:
    """Return the size of each named dimension. A first dimension is that of the rows, unless an input indexes it."""
    chosen: dict[str, int] = {}
    for spec in inputs:
        width = len(spec.shape) - (2 if spec.shape[-1:] in ((1,), (3,), (4,)) else 1)  # the last but for colours
        for axis, dim in enumerate(spec.shape):
            if isinstance(dim, int) or dim in chosen:
                continue
            if axis == 0 and dim not in indexed:
                chosen[dim] = sizes.rows
            elif len(spec.shape) >= 4:
                chosen[dim] = sizes.image[0 if axis < width else 1]
            else:
                chosen[dim] = int(random.integers(sizes.lengths[0], sizes.lengths[1] + 1))
    return chosen


def _values(spec: TensorSpec, chosen: Mapping[str, int], allowed: _IntegerRange, random: np.random.Generator) -> Array:
    shape = tuple(dim if isinstance(dim, int) else chosen[dim] for dim in spec.shape)
    dtype = BY_NAME[spec.dtype].numpy
    if dtype.kind == "O":
        return np.full(shape, b"sample", dtype)
    if dtype.kind not in "iub":
        return random.standard_normal(shape).astype(dtype)
    if _is_mask(spec):
        return np.ones(shape, dtype)
    if dtype.kind == "b":
        return random.integers(0, 2, shape).astype(dtype)
    bound = allowed.bound(chosen)
    if allowed.compared and bound is None:
        return random.choice(allowed.compared, shape).astype(dtype)
    is_image = dtype == np.uint8 and len(shape) >= 3 and bound is None
    values = random.integers(0, 256 if is_image else min(bound or _DEFAULT_BOUND, np.iinfo(dtype).max), shape)
    others = np.setdiff1d(np.arange(bound or 0), allowed.compared) if allowed.compared else np.empty(0)
    if others.size:
        values = np.where(np.isin(values, allowed.compared), random.choice(others, shape), values)
    return values.astype(dtype)


def with_enough(
    samples: Samples,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    known: Sequence[Feeds],
    oracle: Oracle,
    budget: Budget,
    seed: int,
) -> Samples:
    """Return ``samples`` with as many perturbed ones as it takes to judge ``outputs`` by ``budget``.

    ``known`` are the source's outputs for the first samples; without them, the samples stay as they are. Perturbed
    feeds for which ``oracle`` gives NaN or outputs of other ranks are left out, and so are all from the first one on
    which it fails.
    """
    if not known:
        return samples
    judged = [known[0][s.name] for s in outputs if s.kind == "logits"]
    rows = [math.prod(each.shape[:-1] if has_slices(each) else each.shape[:1]) for each in judged if each.ndim]
    wanted = [SAMPLES / (_batch(samples.feeds[0]) if may_have_batch_axis(inputs, outputs) else 1)]
    wanted += [budget.rows_to_judge() / max(1, each) for each in rows]
    missing = math.ceil(max(wanted)) - len(samples.feeds)
    if missing <= 0:
        return samples
    random = np.random.default_rng(seed)
    made: list[Feeds] = []
    for share in (1.0, _SMALLER):  # of a step; a smaller one stays nearer to inputs that are known to be valid
        perturbed = [_perturbed(samples.feeds, i, random, share) for i in range(len(made), missing)]
        tried = [feed for feed in perturbed if feed is not None]
        try:
            for feed, found in zip(tried, oracle.outputs(tried), strict=False):
                alike = all(array.ndim == known[0][name].ndim for name, array in found.items())
                made += [feed] if alike and not _has_nan(found) else []
        except RuntimeFailure:
            continue
    return replace(samples, feeds=(*samples.feeds, *made), made=len(made))


def _batch(feed: Mapping[str, Array]) -> int:
    """Return how many samples a feed holds, if its first axis is the batch: the smallest first dimension."""
    return max(1, min((array.shape[0] if array.ndim else 1 for array in feed.values()), default=1))


def _perturbed(feeds: Sequence[Feeds], number: int, random: np.random.Generator, share: float) -> Feeds | None:
    """Return a variant of feed ``number``; None if it is one of ``feeds``: all inputs are masks, flags or strings."""
    feed = feeds[number % len(feeds)]
    made = {name: _perturb(array, [other[name] for other in feeds], random, share) for name, array in feed.items()}
    return None if any(all(np.array_equal(made[n], other[n]) for n in made) for other in feeds) else made


def _perturb(array: Array, all_samples: Sequence[Array], random: np.random.Generator, share: float) -> Array:
    if array.dtype.kind == "f":
        alike = [other for other in all_samples if other.shape == array.shape]
        one, other = (alike[i] for i in random.integers(0, len(alike), 2))
        if len(alike) > 1 and not np.array_equal(one, other, equal_nan=True):
            return np.asarray(array + share * _STEP * (one - other), array.dtype)
        return np.asarray(array * (1 + share * _RELATIVE * random.standard_normal(array.shape)), array.dtype)
    if array.dtype.kind in "iu" and array.size > 1 and not np.isin(array, (0, 1)).all():
        flat = array.reshape(-1).copy()
        replaced = random.random(flat.size) < _REPLACED
        flat[replaced] = random.choice(array.reshape(-1), int(replaced.sum()))
        return flat.reshape(array.shape)
    return array
