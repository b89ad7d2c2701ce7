"""Makes more samples of the given ones, where these are too few to judge a model by.

The source can run on anything, so an accuracy gate never has to guess from three samples: it perturbs them, seeded, and
measures on those too. A float array moves along half the difference of two others, so that every feature keeps its
scale; without others, each element changes by a quarter of itself. A quarter of the integers take the value of another
position of the same array, so that they stay valid indices. Masks and flags, which are 0 or 1, are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from bf16kit.drift.budget import Budget
from bf16kit.messages.errors import RuntimeFailure
from bf16kit.numerics.tensors import TensorSpec
from converter.source import Array, Feeds, Oracle
from converter.verify.batchaxis import may_have_batch_axis
from converter.verify.samples import Samples

SAMPLES = 16  # to know how much a slice of an output varies
_STEP = 0.5  # of the difference of two other samples
_RELATIVE = 0.25  # of each element, where there are no others
_SMALLER = 0.1  # of these steps, where the source rejects the feeds that they give
_REPLACED = 0.25  # share of an integer input's elements


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
    feeds for which ``oracle`` gives NaN are left out, and so are all from the first one on which it fails.
    """
    if not known:
        return samples
    rows = [math.prod(known[0][s.name].shape[:-1]) for s in outputs if s.kind == "logits" and known[0][s.name].ndim]
    wanted = [SAMPLES / (_batch(samples.feeds[0]) if may_have_batch_axis(inputs, outputs) else 1)]
    wanted += [budget.rows_to_judge() / max(1, each) for each in rows]
    missing = math.ceil(max(wanted)) - len(samples.feeds)
    if missing <= 0:
        return samples
    random = np.random.default_rng(seed)
    made: list[Feeds] = []
    for share in (1.0, _SMALLER):  # of a step; a smaller one stays nearer to inputs that are known to be valid
        perturbed = [_perturbed(samples.feeds, i, random, share) for i in range(len(made), missing)]
        made += _accepted([feed for feed in perturbed if not _is_one_of(feed, samples.feeds)], oracle)
    return replace(samples, feeds=(*samples.feeds, *made), made=len(made))


def _accepted(feeds: Sequence[Feeds], oracle: Oracle) -> Iterator[Feeds]:
    try:
        for feed, outputs in zip(feeds, oracle.outputs(feeds), strict=False):
            if not any(array.dtype.kind == "f" and np.isnan(array).any() for array in outputs.values()):
                yield feed
    except RuntimeFailure:
        return


def _is_one_of(feed: Feeds, others: Sequence[Feeds]) -> bool:
    """Whether perturbing changed nothing, because all inputs are masks, flags or strings."""
    return any(all(np.array_equal(feed[name], other[name]) for name in feed) for other in others)


def _batch(feed: Mapping[str, Array]) -> int:
    """Return how many samples a feed holds, if its first axis is the batch: the smallest first dimension."""
    return max(1, min((array.shape[0] if array.ndim else 1 for array in feed.values()), default=1))


def _perturbed(feeds: Sequence[Feeds], number: int, random: np.random.Generator, share: float) -> Feeds:
    feed = feeds[number % len(feeds)]
    return {name: _perturb(array, [other[name] for other in feeds], random, share) for name, array in feed.items()}


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
