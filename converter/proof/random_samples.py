"""Seeded random samples for a model that came without any: integers stay within the tables that they index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from bf16kit.tensors import BY_NAME, TensorSpec
from converter.model import Array, Feeds
from converter.proof.samples import Samples

if TYPE_CHECKING:
    import onnx_ir as ir

    from converter.model import Sampler

COUNT = 8  # feeds
ROWS = 2  # of the first named dimension: two, so that batching can be tried
_LENGTHS = (4, 32)  # other named dimensions
_IMAGE = 64  # named dimensions of inputs of rank 4 and more: pixels
_DEFAULT_BOUND = 2  # an integer that indexes no table found: a flag or a mask

# Ops that hand their first input's values on unchanged.
_TRANSPARENT = frozenset(
    {"Cast", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Tile", "Transpose", "Unsqueeze"}
)


def generate(inputs: Sequence[TensorSpec], graph: ir.Model, sampler: Sampler | None, seed: int) -> Samples:
    """:data:`COUNT` feeds: from ``sampler`` when the source brought one, else random within the graph's bounds."""
    if sampler is not None:
        return Samples(tuple(sampler(seed, COUNT)), f"random token sequences (seed {seed})")
    bounds = {value.name or "": index_bound(value) for value in graph.graph.inputs}
    feeds = tuple(_random(inputs, bounds, seed))
    return Samples(feeds, f"random inputs (seed {seed})")


def index_bound(value: ir.Value) -> int | None:
    """The size of the smallest table that ``value`` indexes, be it through ops that move it; None for no table."""
    bounds: list[int | None] = []
    for node, position in value.uses():
        if node.op_type == "Gather" and position == 1:
            table = node.inputs[0]
            axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
            size = table.shape[axis] if table is not None and table.shape is not None else None
            bounds.append(size if isinstance(size, int) else None)
        elif node.op_type in _TRANSPARENT and position == 0:
            bounds.append(index_bound(node.outputs[0]))
    found = [bound for bound in bounds if bound]
    return min(found) if found else None


def _random(inputs: Sequence[TensorSpec], bounds: Mapping[str, int | None], seed: int) -> Iterator[Feeds]:
    random = np.random.default_rng(seed)
    for _ in range(COUNT):
        sizes = _sizes(inputs, random)
        yield {spec.name: _values(spec, sizes, bounds.get(spec.name), random) for spec in inputs}


def _sizes(inputs: Sequence[TensorSpec], random: np.random.Generator) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for spec in inputs:
        for axis, dim in enumerate(spec.shape):
            if isinstance(dim, int) or dim in sizes:
                continue
            if axis == 0:
                sizes[dim] = ROWS
            else:
                sizes[dim] = _IMAGE if len(spec.shape) >= 4 else int(random.integers(_LENGTHS[0], _LENGTHS[1] + 1))
    return sizes


def _values(spec: TensorSpec, sizes: Mapping[str, int], bound: int | None, random: np.random.Generator) -> Array:
    shape = tuple(dim if isinstance(dim, int) else sizes[dim] for dim in spec.shape)
    dtype = BY_NAME[spec.dtype].numpy
    if dtype.kind == "b":
        return random.integers(0, 2, shape).astype(dtype)
    if dtype.kind in "iu":
        if "mask" in spec.name.lower():
            return np.ones(shape, dtype)
        return random.integers(0, min(bound or _DEFAULT_BOUND, np.iinfo(dtype).max), shape).astype(dtype)
    if dtype.kind == "O":
        return np.full(shape, b"sample", dtype)
    return random.standard_normal(shape).astype(dtype)
