"""Finds which initializer of the graph holds which checkpoint tensor, by content, because exporters change names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import onnx_ir as ir

from bf16kit.converter.graph.equality import OTHER_FLOATS, Array, Fingerprint, fingerprint, same_bits
from bf16kit.converter.graph.initializers import stays_inline
from bf16kit.converter.graph.names import FreshNames, values_of

# The orders of axes that turn an initializer into the same weight as a checkpoint stores it: for matrices; for
# TensorFlow's convolutions (height, width, in, out) from (out, in, height, width), likewise for volumes; and for its
# depthwise convolutions (height, width, channels, 1) from (channels, 1, height, width).
_ORDERS: Mapping[int, tuple[tuple[int, ...], ...]] = {
    2: ((1, 0),),
    4: ((2, 3, 1, 0), (2, 3, 0, 1)),
    5: ((2, 3, 4, 1, 0),),
}

_Order = tuple[int, ...] | None
_Index = dict[Fingerprint, list[tuple[ir.Value, ir.TensorProtocol]]]


@dataclass(frozen=True, slots=True)
class Match:
    """A checkpoint tensor equals ``initializer`` with its axes permuted by ``permutation`` (None: not permuted).

    An fp16 or bf16 tensor equals it when widened, which is exact and can be undone; an fp64 tensor when rounded to
    fp32, and fp32 is what is restored.
    """

    initializer: str
    permutation: _Order = None


def match(
    graph: ir.Graph,
    checkpoint: Mapping[str, Array],
    orders: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> dict[str, Match]:
    """Match ``checkpoint`` tensors to initializers of ``graph``, and rename initializers to the checkpoint's names.

    ``orders`` has the order of axes in the graph for tensors for which it is neither their own nor the reverse. Several
    checkpoint tensors may match one initializer (tied weights), which takes the first one's name unless it has one of
    theirs. Tensors without a match are not in the result. Initializers that stay inline in the graph are ignored: they
    could not be read back from a weights file.
    """
    # Tensors, not arrays: tensors widened on reading would otherwise all be in memory at once.
    index: _Index = defaultdict(list)
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and not stays_inline(tensor):
            index[fingerprint(tensor.numpy())].append((value, tensor))
    looked_up = ((name, _lookup(array, orders.get(name), index)) for name, array in checkpoint.items())
    found = {name: hit for name, hit in looked_up if hit is not None}
    holds: dict[ir.Value, list[str]] = defaultdict(list)
    for name, (value, _) in found.items():
        holds[value].append(name)
    fresh = FreshNames(v.name for g in (graph, *graph.subgraphs()) for v in values_of(g) if v.name)
    for value, names in holds.items():
        if value.name not in names:
            value.name = fresh.make(names[0])
    return {name: Match(value.name or "", order) for name, (value, order) in found.items()}


def _lookup(array: Array, order: _Order, index: _Index) -> tuple[ir.Value, _Order] | None:
    for as_fp32 in (False, True) if array.dtype.name in OTHER_FLOATS else (False,):
        for view, back in _views(array, order):
            for value, candidate in index.get(fingerprint(view, as_fp32=as_fp32), ()):
                if same_bits(view, candidate.numpy(), as_fp32=as_fp32):
                    return value, back
    return None


def _views(array: Array, order: _Order) -> Iterator[tuple[Array, _Order]]:
    """Yield ``array`` in each order its axes may have in the graph, with the permutation that restores it."""
    if order is not None:
        yield array.transpose(order), tuple(int(axis) for axis in np.argsort(order))
    yield array, None
    for order in _ORDERS.get(array.ndim, ()):
        yield array.transpose(np.argsort(order)), order
