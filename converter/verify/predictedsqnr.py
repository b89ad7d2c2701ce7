"""The predicted SQNR: how much noise rounding to bf16 should have added at each value of a graph, if nothing is wrong.

Rounding to nearest moves a value ``m·2^e`` (1 ≤ m < 2) by an error uniform in ±u·2^e, u = 2^-8. Its mean square is
u²·4^e/3. Over data of many magnitudes, m is spread evenly in log m, so the mean of m² is 3/(2 ln 2). Rounding therefore
costs noise/signal = u²/3 · (2 ln 2)/3 = 2.35e-6, an SQNR of 56.3 dB: :data:`ROUNDING`.

Noise propagates. Independent errors add in power, so

* a product, and any operator not named here, passes on the sum of its operands' noise/signal;
* a sum passes on the mean of its terms' noise/signal, weighted by their power (terms that do not cancel add in power);
* an operator that moves or chooses elements passes it on unchanged; a power p of a value has p² times its noise/signal;
* :data:`ROUNDING` is added by each bf16 weight, by the result of each bf16 node, and by each fp32 value that is read
  by a bf16 node or by a product of the cpu-bf16 profile.

Along a chain of d products, SQNR therefore falls as 56.3 − 10·log10(d) dB; where results are rounded too, 2d replaces
d. The branch that a residual network adds to its trunk counts by its power. Nothing is fitted. The prediction leaves
out what lessens noise: averages of one sign, saturating activations. It also leaves out what amplifies noise:
cancellation, and functions that are steep where the values are. So a layer below its predicted SQNR amplifies noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import onnx_ir as ir

from bf16kit.numerics.rounding import UNIT_ROUNDOFF
from converter.graph.initializers import const
from converter.graph.operators import EXACT, WEIGHTED

ROUNDING = UNIT_ROUNDOFF**2 / 3 * (2 * math.log(2) / 3)

_SUMS = frozenset({"Add", "Sub", "Sum", "Mean", "Concat", "Where", "Max", "Min"})
_POWERS = {"Sqrt": 0.5}


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
        propagated = _propagated(
            node, [(value, _as_read(node, value, found, rounded)) for value in operands(node)], mean
        )
        own = ROUNDING if node.name in rounded.nodes and node.op_type not in EXACT else 0.0
        for output in node.outputs:
            found[output] = propagated + own
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
    cast = cast or (node.name in rounded.reading and not _is_weight(value))
    return found.get(value, 0.0) + (ROUNDING if cast and not value.is_initializer() else 0.0)


def _is_weight(value: ir.Value) -> bool:
    """Whether ``value`` is an initializer, or was computed from initializers alone, as a transposed weight is."""
    producer = value.producer()
    return value.is_initializer() or (
        producer is not None and all(each is None or each.is_initializer() for each in producer.inputs)
    )


def _propagated(node: ir.Node, terms: Collection[tuple[ir.Value, float]], mean: Callable[[ir.Value], float]) -> float:
    if node.op_type in _SUMS:
        powers = [mean(value) for value, _ in terms]
        total = sum(powers)
        if total > 0 and math.isfinite(total):
            return sum(power * noise for power, (_, noise) in zip(powers, terms, strict=True)) / total
        return max((noise for _, noise in terms), default=0.0)
    return _exponent(node) ** 2 * sum(noise for _, noise in terms)


def _exponent(node: ir.Node) -> float:
    if node.op_type == "Mul" and node.inputs[0] is node.inputs[1]:
        return math.sqrt(2)  # the sum counts the operand twice, which makes 4 in all
    if node.op_type == "Pow":
        tensor = const(node.inputs[1])
        return float(tensor.numpy().reshape(-1)[0]) if tensor is not None and tensor.size == 1 else 1.0
    return _POWERS.get(node.op_type, 1.0)
