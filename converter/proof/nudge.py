"""Measures a model's fp32 noise: how its outputs change when every weight moves by a few ulps.

A sum of products computed in another order is, to the last bit, the exact sum for weights that differ by a few ulps
(backward error). So the change that nudged weights cause is the difference that another program may show.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bf16kit.artifact import Artifact
from bf16kit.runtime import Runtime
from bf16kit.runtime.externaldata import REBUILT
from converter.model import FP32_ROUNDOFF, Array, Feeds
from converter.proof.running import open_fp32_graph

if TYPE_CHECKING:
    import onnx_ir as ir

ULPS = 16
_CHUNK = 1 << 20  # elements
_LARGEST = 0x7F800000  # bits of infinity


def nudge(array: Array, random: np.random.Generator, roundoff: float = FP32_ROUNDOFF) -> Array:
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


def nudged_feeds(feeds: Sequence[Feeds], random: np.random.Generator, roundoff: float) -> Iterator[Feeds]:
    """Yield ``feeds`` with their fp32 arrays nudged."""
    for feed in feeds:
        yield {name: nudge(array, random, roundoff) for name, array in feed.items()}


def open_nudged(
    artifact: Artifact, source: ir.Model | None, random: np.random.Generator, roundoff: float, scratch: Path
) -> Runtime:
    """Open the fp32 reference with its weights nudged, except those small enough to be stored in the graph file.

    ``source`` is the reference if the artifact keeps none of its own. The weights are mapped from ``scratch``.
    """
    import onnx_ir as ir

    manifest = artifact.manifest
    inputs = [entry.spec() for entry in manifest.inputs]
    outputs = [entry.spec() for entry in manifest.outputs]
    if source is not None:
        return open_fp32_graph(
            source, inputs, outputs, scratch, lambda _name, tensor: nudge(tensor.numpy(), random, roundoff)
        )
    model = ir.load(artifact.file(manifest.reference or ""))
    reader = Artifact(artifact.path, manifest)

    def read(name: str, tensor: ir.TensorProtocol) -> Array:
        rebuilt = isinstance(tensor, ir.ExternalTensor) and tensor.location == REBUILT
        return nudge(reader.restore(name) if rebuilt else tensor.numpy(), random, roundoff)

    return open_fp32_graph(model, inputs, outputs, scratch, read)
