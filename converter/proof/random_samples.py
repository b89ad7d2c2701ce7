"""Seeded random samples for a model that has none: integers stay within the tables that they index.

The sizes of free dimensions are not known for a given model. So a few plausible sizes are tried on the source: images
of several sizes, sequences, and one row for models that keep a state of one row. The first sizes that it runs on are
used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from bf16kit.errors import RuntimeFailure
from bf16kit.tensors import BY_NAME, TensorSpec
from converter.graph.constants import compared_with, index_bound
from converter.model import Array, Feeds
from converter.proof.samples import Samples

if TYPE_CHECKING:
    import onnx_ir as ir

    from converter.model import Sampler

COUNT = 8  # feeds
ROWS = 2  # size of the first named dimension: two, so that batching can be tested
_FEEDS_PER_ATTEMPT = 2  # feeds per attempt: sizes that do not run fail at once
_DEFAULT_BOUND = 2  # for an integer that indexes no known table: a flag or a mask

RunSource = Callable[[Sequence[Feeds]], object]


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
    ranges = {} if graph is None else {value.name or "": _IntegerRange.of(value) for value in graph.graph.inputs}
    free = any(isinstance(dim, str) for spec in inputs for dim in spec.shape)
    for sizes in _ATTEMPTS if free and run_source is not None else ():
        feeds = _random(inputs, ranges, seed, sizes)
        tried = tuple(islice(feeds, _FEEDS_PER_ATTEMPT))  # the others are made on demand: an input may be wide
        if run_source is None or _can_run(run_source, tried):
            return Samples((*tried, *feeds), f"random inputs (seed {seed})")
        if sizes is _ATTEMPTS[0] and not _can_run(run_source, ()):
            break  # it cannot even be loaded, so no sizes would help
    return Samples(tuple(_random(inputs, ranges, seed, _ATTEMPTS[0])), f"random inputs (seed {seed})")


def _can_run(run_source: RunSource, feeds: Sequence[Feeds]) -> bool:
    try:
        run_source(feeds)
    except RuntimeFailure:
        return False
    return True


@dataclass(frozen=True, slots=True)
class _IntegerRange:
    """The allowed values of an integer input: less than ``bound``, or one of ``choices``."""

    bound: int | None = None
    choices: tuple[int, ...] = ()

    @classmethod
    def of(cls, value: ir.Value) -> _IntegerRange:
        return cls(index_bound(value), compared_with(value))


def _random(
    inputs: Sequence[TensorSpec], ranges: Mapping[str, _IntegerRange], seed: int, sizes: _Sizes
) -> Iterator[Feeds]:
    random = np.random.default_rng(seed)
    for _ in range(COUNT):
        chosen = _choose(inputs, sizes, random)
        yield {spec.name: _values(spec, chosen, ranges.get(spec.name, _IntegerRange()), random) for spec in inputs}


def _choose(inputs: Sequence[TensorSpec], sizes: _Sizes, random: np.random.Generator) -> dict[str, int]:
    chosen: dict[str, int] = {}
    for spec in inputs:
        for axis, dim in enumerate(spec.shape):
            if isinstance(dim, int) or dim in chosen:
                continue
            if axis == 0:
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
    if dtype.kind == "b":
        return random.integers(0, 2, shape).astype(dtype)
    if dtype.kind in "iu":
        return _integers(spec, shape, allowed, random).astype(dtype)
    if dtype.kind == "O":
        return np.full(shape, b"sample", dtype)
    return random.standard_normal(shape).astype(dtype)


def _integers(spec: TensorSpec, shape: tuple[int, ...], allowed: _IntegerRange, random: np.random.Generator) -> Array:
    dtype = BY_NAME[spec.dtype].numpy
    if "mask" in spec.name.lower():
        return np.ones(shape, dtype)
    if allowed.choices:
        return random.choice(allowed.choices, shape)
    is_image = dtype == np.uint8 and len(shape) >= 3 and allowed.bound is None
    bound = 256 if is_image else min(allowed.bound or _DEFAULT_BOUND, np.iinfo(dtype).max)
    return random.integers(0, bound, shape)
