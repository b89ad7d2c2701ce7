"""Compares two graphs of one model, value by value: inner values become outputs, and are reduced at once.

Values keep the source's names through all passes, so values are matched by name. A value that only one graph has is not
compared: it went into a product of the CPU kernel, or a BatchNorm into its weights.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from bf16kit.numerics.rounding import LARGEST
from bf16kit.numerics.tensors import TensorSpec
from converter.graph.types import is_float_tensor
from converter.source import Array, Feeds

if TYPE_CHECKING:
    from bf16kit.runtime.ort.onnx import OnnxRuntime

CHUNK = 128 << 20  # approximate bytes of inner values that one graph may return at a time
_FIRST = 8  # values in the first chunk; their size decides that of the next
_BLOCK = 1 << 14  # elements converted to float64 at a time: they fit the cache, and malloc need not map them anew

# The suffix of a value's name where a graph also holds it in bf16: the widened value, which its readers see.
_WIDENED = ("/emulated", "/fp32")


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph to run on the CPU: its external data is in files in ``base``, or in the arrays of ``external``."""

    model: ir.Model
    base: Path
    external: Mapping[str, Array]


@dataclass(slots=True)
class Power:
    """Sums over all elements of one value: the squared reference, the squared difference, and the ``count``."""

    signal: float = 0.0
    noise: float = 0.0
    count: int = 0

    def add(self, reference: Array, candidate: Array) -> None:
        """Add one run's value. A candidate that is not finite where the reference is has infinite noise.

        Masks beyond bf16's largest number are left out, because profiles hold that largest number instead.
        """
        flat_r, flat_c = reference.reshape(-1), candidate.reshape(-1)
        for start in range(0, flat_r.size, _BLOCK):
            r, c = (flat[start : start + _BLOCK].astype(np.float64) for flat in (flat_r, flat_c))
            if not -LARGEST <= r.min() <= r.max() <= LARGEST:  # false for NaN, too
                masks = (np.abs(r) > LARGEST) & (np.abs(c) > LARGEST / 2) & np.isfinite(c)
                judged = np.isfinite(r) & ~masks
                r, c = r[judged], c[judged]
            self._add(r, c)

    def _add(self, r: Array, c: Array) -> None:
        self.count += r.size
        self.signal += float(r @ r)
        difference = r - c
        noise = float(difference @ difference)
        self.noise += noise if math.isfinite(noise) else math.inf

    @property
    def ratio(self) -> float:
        """Noise ÷ signal; 0 for equal values, infinite if the reference is zero and the candidate is not."""
        if self.noise == 0:
            return 0.0
        return self.noise / self.signal if self.signal else math.inf

    @property
    def mean(self) -> float:
        """The mean square of the reference's elements."""
        return self.signal / self.count if self.count else 0.0


def compare(
    reference: Graph,
    candidate: Graph,
    feeds: Sequence[Feeds],
    chunk: int = CHUNK,
) -> dict[str, Power]:
    """Compare every fp32 value that ``reference`` and ``candidate`` both have, over all ``feeds``; by name.

    Both graphs run once per feed and chunk of values, so that about ``chunk`` bytes of values of each are in memory at
    a time. Raises :class:`RuntimeFailure` if a graph does not run.
    """
    available = frozenset(_values(candidate.model))
    pairs = {name: found for name in _values(reference.model) if (found := _find(name, available)) is not None}
    names, powers = list(pairs), dict[str, Power]()
    start, count = 0, _FIRST
    while start < len(names):
        part = {name: pairs[name] for name in names[start : start + count]}
        largest = _compare((reference, candidate), part, feeds, powers)
        start += count
        count = max(1, min(4 * count, int(count * chunk / max(1, largest))))
    return powers


def _values(model: ir.Model) -> list[str]:
    """Return the names of the fp32 values that nodes of the main graph compute; without inputs and weights."""
    outputs = chain.from_iterable(node.outputs for node in model.graph)
    return [value.name or "" for value in outputs if is_float_tensor(value)]


def _find(name: str, available: Container[str]) -> str | None:
    return next((found for suffix in (*_WIDENED, "") if (found := name + suffix) in available), None)


def _compare(
    sides: tuple[Graph, Graph], pairs: Mapping[str, str], feeds: Sequence[Feeds], powers: dict[str, Power]
) -> int:
    """Add ``pairs`` of values to ``powers``; return the largest number of bytes they took in one run."""
    available = dict.fromkeys(pairs.values())
    largest, runtimes = 0, (_open(sides[0], list(pairs)), _open(sides[1], list(available)))
    try:
        for feed in feeds:
            expected, found = runtimes[0].run(feed, list(pairs)), runtimes[1].run(feed, list(available))
            largest = max(largest, sum(array.nbytes for array in expected.values()))
            for name, other in pairs.items():
                if expected[name].shape == found[other].shape:
                    powers.setdefault(name, Power()).add(expected[name], found[other])
    finally:
        for runtime in runtimes:
            runtime.close()
    return largest


def _open(graph: Graph, names: Sequence[str]) -> OnnxRuntime:
    """Open ``graph`` with the values ``names`` as its outputs, and only the nodes that they need."""
    from bf16kit.runtime.ort.onnx import OnnxRuntime

    model = graph.model
    part = ir.convenience.extract(model.graph, list(model.graph.inputs), names)
    for output in part.outputs:  # without a shape: no warning if shape inference names a dimension differently
        output.shape = None
    slim = ir.Model(part, ir_version=model.ir_version, functions=list(model.functions.values()))
    data = ir.to_proto(slim).SerializeToString(deterministic=True)
    return OnnxRuntime(
        data,
        [_spec(value) for value in model.graph.inputs],
        [TensorSpec(name, "float32", ()) for name in names],
        precision="fp32",
        base_dir=graph.base,
        external=graph.external,
        pack=False,  # two sessions are open at once, created for every chunk, and run only a few feeds
    )


def _spec(value: ir.Value) -> TensorSpec:
    if value.dtype == ir.DataType.STRING:  # numpy calls it object
        return TensorSpec(value.name or "", "string", ())
    dtype = "float32" if value.dtype is None else value.dtype.numpy().name
    return TensorSpec(value.name or "", dtype, ())
