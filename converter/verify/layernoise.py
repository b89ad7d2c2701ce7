"""The noise at each value of a graph: measured by running it beside the reference, and predicted for rounding alone.

Values keep the source's names through all passes, so they are matched by name. A value that only one graph has is not
compared: it went into a product of the CPU kernel, or a BatchNorm into its weights.

Rounding to nearest moves a value ``m·2^e`` (1 ≤ m < 2) by an error uniform in ±u·2^e, u = 2^-8, of mean square
u²·4^e/3. Over data of many magnitudes, m is spread evenly in log m, so the mean of m² is 3/(2 ln 2), and rounding costs
noise/signal = u²/3 · (2 ln 2)/3 = 2.35e-6, an SQNR of 56.3 dB: :data:`ROUNDING`. Independent errors add in power, so

* a product, and any operator not named here, passes on the sum of its operands' noise/signal;
* a sum passes on the mean of its terms' noise/signal, weighted by their power (terms that do not cancel add in power);
* an operator that moves or chooses elements passes it on unchanged; a power p of a value has p² times its noise/signal;
* :data:`ROUNDING` is added by each bf16 weight, by the result of each bf16 node, and by each fp32 value that is read
  by a bf16 node or by a product of the cpu-bf16 profile.

Nothing is fitted. The prediction leaves out what lessens noise (averages of one sign, saturating activations) and what
amplifies it (cancellation, functions that are steep where the values are). So a layer below its predicted SQNR
amplifies noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from bf16kit.converter.graph.initializers import const
from bf16kit.converter.graph.operators import EXACT, WEIGHTED
from bf16kit.converter.graph.types import is_float_tensor
from bf16kit.converter.source import Array, Feeds
from bf16kit.numerics.rounding import LARGEST, UNIT_ROUNDOFF
from bf16kit.numerics.tensors import TensorSpec

if TYPE_CHECKING:
    from bf16kit.runtime.ort.onnx import OnnxRuntime

_CHUNK = 128 << 20  # approximate bytes of inner values that one graph may return at a time
_FIRST = 8  # values in the first chunk; their size decides that of the next
_BLOCK = 1 << 14  # elements converted to float64 at a time: they fit the cache, and malloc need not map them anew
# The suffix of a value's name where a graph also holds it in bf16: the widened value, which its readers see.
_WIDENED = ("/emulated", "/fp32")

ROUNDING = UNIT_ROUNDOFF**2 / 3 * (2 * math.log(2) / 3)
_SUMS = frozenset({"Add", "Sub", "Sum", "Mean", "Concat", "Where", "Max", "Min"})


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
            difference = r - c
            noise = float(difference @ difference)
            self.count += r.size
            self.signal += float(r @ r)
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


def compare(reference: Graph, candidate: Graph, feeds: Sequence[Feeds]) -> dict[str, Power]:
    """Compare every fp32 value that ``reference`` and ``candidate`` both have, over all ``feeds``; by name.

    Both graphs run once per feed and chunk of values: inner values become outputs, and are reduced at once. Raises
    :class:`RuntimeFailure` if a graph does not run.
    """
    available = dict.fromkeys(_values(candidate.model))
    found = {n: next((n + s for s in (*_WIDENED, "") if n + s in available), None) for n in _values(reference.model)}
    pairs = [(name, own) for name, own in found.items() if own is not None]
    powers: dict[str, Power] = {}
    start, count, largest = 0, _FIRST, 1
    while start < len(pairs):
        part = dict(pairs[start : start + count])
        names, others = list(part), list(dict.fromkeys(part.values()))
        with closing(_open(reference, names)) as one, closing(_open(candidate, others)) as other:
            for feed in feeds:
                r, c = one.run(feed, names), other.run(feed, others)
                largest = max(largest, sum(array.nbytes for array in r.values()))
                for name, own in part.items():
                    if r[name].shape == c[own].shape:
                        powers.setdefault(name, Power()).add(r[name], c[own])
        start += count
        count, largest = max(1, min(4 * count, int(count * _CHUNK / largest))), 1
    return powers


def _values(model: ir.Model) -> Iterator[str]:
    """Yield the names of the fp32 values that nodes of the main graph compute; without inputs and weights."""
    return (value.name or "" for node in model.graph for value in node.outputs if is_float_tensor(value))


def _open(graph: Graph, names: Sequence[str]) -> OnnxRuntime:
    """Open ``graph`` with the values ``names`` as its outputs, and only the nodes that they need."""
    from bf16kit.runtime.ort.onnx import OnnxRuntime

    model = graph.model
    part = ir.convenience.extract(model.graph, list(model.graph.inputs), names)
    for output in part.outputs:  # without a shape: no warning if shape inference names a dimension differently
        output.shape = None
    slim = ir.Model(part, ir_version=model.ir_version, functions=list(model.functions.values()))
    return OnnxRuntime(
        ir.to_proto(slim).SerializeToString(deterministic=True),
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
    return TensorSpec(value.name or "", "float32" if value.dtype is None else value.dtype.numpy().name, ())


@dataclass(frozen=True, slots=True)
class Rounded:
    """The rounding of a profile: it stores ``tensors`` in bf16 and computes ``nodes`` in bf16. The nodes in ``reading``
    round only their inputs."""

    tensors: frozenset[str]
    nodes: frozenset[str]
    reading: frozenset[str] = frozenset()


def predicted(graph: ir.Graph, rounded: Rounded, mean: Callable[[ir.Value], float]) -> dict[ir.Value, float]:
    """Return the noise ÷ signal that each value of ``graph`` should have; ``mean`` gives mean squares (NaN:
    unknown)."""
    found: dict[ir.Value, float] = {
        value: ROUNDING if name in rounded.tensors else 0.0 for name, value in graph.initializers.items()
    }
    for node in graph:
        terms = [(value, _as_read(node, value, found, rounded)) for value in operands(node)]
        own = ROUNDING if node.name in rounded.nodes and node.op_type not in EXACT else 0.0
        found.update(dict.fromkeys(node.outputs, _propagated(node, terms, mean) + own))
    return found


def operands(node: ir.Node) -> Iterator[ir.Value]:
    """Yield the floating point inputs of ``node``; for an operator that moves elements, only the moved one."""
    inputs = [value for value in node.inputs if value is not None]
    if node.op_type in EXACT and node.op_type not in _SUMS:
        inputs = inputs[:1]
    return (value for value in inputs if value.dtype == ir.DataType.FLOAT)


def depth(graph: ir.Graph) -> dict[ir.Value, int]:
    """Return the number of products on the longest path to each value, including the node that computes it."""
    found: dict[ir.Value, int] = {}
    for node in graph:
        before = max((found.get(value, 0) for value in node.inputs if value is not None), default=0)
        here = before + (node.op_type in WEIGHTED and any(True for _ in operands(node)))
        found.update(dict.fromkeys(node.outputs, here))
    return found


def _as_read(node: ir.Node, value: ir.Value, found: dict[ir.Value, float], rounded: Rounded) -> float:
    """Return the noise of ``value`` as ``node`` reads it: an fp32 value is rounded on its way into a bf16 node."""
    producer = value.producer()
    cast = node.name in rounded.nodes and (producer is None or producer.name not in rounded.nodes)
    if node.name in rounded.reading:  # it does not round what was computed from weights alone, as a transposed one is
        cast |= producer is None or not all(each is None or each.is_initializer() for each in producer.inputs)
    return found.get(value, 0.0) + (ROUNDING if cast and not value.is_initializer() else 0.0)


def _propagated(node: ir.Node, terms: Collection[tuple[ir.Value, float]], mean: Callable[[ir.Value], float]) -> float:
    if node.op_type in _SUMS:
        powers = [mean(value) for value, _ in terms]
        total = sum(powers)
        if total > 0 and math.isfinite(total):
            return sum(power * noise for power, (_, noise) in zip(powers, terms, strict=True)) / total
        return max((noise for _, noise in terms), default=0.0)
    exponent = 0.5 if node.op_type == "Sqrt" else 1.0
    if node.op_type == "Mul" and node.inputs[0] is node.inputs[1]:
        exponent = math.sqrt(2)  # the sum counts the operand twice, which makes 4 in all
    tensor = const(node.inputs[1]) if node.op_type == "Pow" else None
    if tensor is not None and tensor.size == 1:
        exponent = float(tensor.numpy().reshape(-1)[0])
    return exponent**2 * sum(noise for _, noise in terms)
