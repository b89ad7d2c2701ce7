"""Measures a model's fp32 noise: how its outputs change when every weight is perturbed by a few ulps.

A sum of products computed in another order is, to the last bit, the exact sum for weights that differ by a few ulps
(backward error). So the change that perturbed weights cause is the difference that another program may show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bf16kit.messages.errors import RuntimeFailure
from bf16kit.runtime import Runtime
from converter.source import FP32_ROUNDOFF, Array, Feeds
from converter.verify.distance import mask_unstable, measure_distance
from converter.verify.running import ReadWeight
from converter.verify.spool import Spool

ULPS = 16
_RUNS = 3
_CHUNK = 1 << 20  # elements
_LARGEST = 0x7F800000  # bits of infinity

OpenGraph = Callable[[ReadWeight], Runtime]


def perturb(array: Array, random: np.random.Generator, roundoff: float = FP32_ROUNDOFF) -> Array:
    """Return ``array`` with each fp32 value moved up or down by up to :data:`ULPS` units in the last place.

    If the source's arithmetic is coarser than fp32, with a larger unit ``roundoff``, values move by as many units of
    that arithmetic. Other dtypes, zeros, and values that would change sign or become infinite are unchanged.
    """
    if array.dtype != np.float32:
        return array
    max_units = int(ULPS * roundoff / FP32_ROUNDOFF)
    moved: NDArray[np.float32] = np.array(array, order="C")
    bits = moved.reshape(-1).view(np.int32)
    for start in range(0, bits.size, _CHUNK):
        chunk = bits[start : start + _CHUNK]
        magnitude = chunk & 0x7FFFFFFF
        movable = (magnitude > max_units) & (magnitude < _LARGEST - max_units)
        chunk[movable] += random.integers(-max_units, max_units + 1, chunk.size, np.int32)[movable]
    return moved


class Noise:
    """The fp32 noise of one graph: how its outputs for ``feeds`` change when its weights and the feeds are perturbed.

    ``open_graph`` opens the graph with the weights that it is given, perturbed or as they are. Both runs read the
    source's own weights and go the same way, so no fault in the files or graphs that are judged can widen their bound.
    Nothing runs before the noise is asked for, and it is measured once. Outputs are kept in unnamed files in
    ``scratch``.
    """

    def __init__(self, open_graph: OpenGraph, feeds: Sequence[Feeds], roundoff: float, scratch: Path | None) -> None:
        self._open, self._feeds, self._roundoff, self._scratch = open_graph, feeds, roundoff, scratch

    def largest_change(self, name: str) -> float:
        """Return the largest relative change of an output."""
        unchanged, *runs = self._runs
        distances = [
            measure_distance(unchanged[feed][name], run[feed][name]).relative_l2
            for run in runs
            for feed in range(len(unchanged))
        ]
        return max(distances, default=0.0)

    def pairs(self, name: str) -> list[list[tuple[Array, Array]]]:
        """Return an output of each feed as it is and perturbed, for each perturbed run."""
        unchanged, *runs = self._runs
        return [[(unchanged[feed][name], run[feed][name]) for feed in range(len(unchanged))] for run in runs]

    def without_unstable(self, array: Array, source: Array, name: str, feed: int) -> Array:
        """Return ``array``, an output for one feed, with values that noise flips taken from ``source``."""
        return mask_unstable(array, source, [run[feed][name] for run in self._runs])

    @cached_property
    def _runs(self) -> list[Spool]:
        """The outputs of the graph as it is, then those of each perturbed run."""
        runs = [self._run(None), *(self._run(np.random.default_rng(seed)) for seed in range(_RUNS))]
        return [run for run in runs if run is not None]

    def _run(self, random: np.random.Generator | None) -> Spool | None:
        """Return the outputs of the graph; None if it does not run perturbed, because noise changed a computed size."""

        def moved(array: Array) -> Array:
            return array if random is None else perturb(array, random, self._roundoff)

        runtime = self._open(lambda _name, tensor: moved(tensor.numpy()))
        outputs = Spool(self._scratch)
        try:
            for feed in self._feeds:
                outputs.append(runtime.run({name: moved(array) for name, array in feed.items()}))
        except RuntimeFailure:
            if random is None:
                raise
            return None
        finally:
            runtime.close()
        return outputs
