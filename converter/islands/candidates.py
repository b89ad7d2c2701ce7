"""The candidates for islands, nodes in bf16 and weights stored in it, and what keeping each in fp32 would cost."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir

from bf16kit.artifact.manifest import Plan, PlanEntry
from converter.graph.initializers import const, dims
from converter.graph.operators import MERGING, MOVEMENT, bf16_form, label
from converter.islands.switches import Bf16, moved_from
from converter.plan import narrowed
from converter.plan.profiles import Profile

Shape = tuple[int, ...]
Shares = Mapping[str, float]  # by name; together 1

_ISLAND = 1e-4  # the fixed price of an island, beside its bytes and arithmetic: casts, and a line in the report
_PRODUCTS_DOMAINS = ("", "com.microsoft")  # FusedMatMul is in the second
_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


@dataclass(frozen=True, slots=True)
class Unit:
    """A candidate: a node, or a weight with the nodes (``readers``) that would then have to compute in fp32 too.

    ``cost`` is what it withholds from bf16: its share of the graph's arithmetic, or of the weights' bytes.
    """

    kind: Literal["node", "weight"]
    name: str
    op: str
    cost: float
    readers: tuple[str, ...] = ()


def bf16_of(plan: Plan, profile: Profile) -> Bf16:
    """Return the nodes and weights of ``profile`` that are bf16 by ``plan``."""
    nodes = plan.nodes[profile.name] if profile.rounds else ()
    return Bf16(frozenset(entry.name for entry in nodes if entry.precision == "bf16"), narrowed(plan.tensors))


def bf16_alone(units: Iterable[Unit]) -> Bf16:
    """Return the nodes and weights among ``units`` as a plan in which only they are bf16."""
    chosen = list(units)
    nodes, weights = (frozenset(unit.name for unit in chosen if unit.kind == kind) for kind in ("node", "weight"))
    return Bf16(nodes, weights)


def candidates(model: ir.Model, plan: Plan, profile: Profile, flops: Shares, stored: Shares) -> list[Unit]:
    """Return the units of ``model``, the base graph of ``profile``; a weight comes before the first node that reads it.

    ``flops`` and ``stored`` are the shares of nodes and of weights. Units that ``--bf16`` asked for are left out, and
    so are nodes that move bf16 data: they follow the data's precision.
    """
    bf16 = bf16_of(plan, profile)
    free = bf16.nodes - _requested(plan.nodes.get(profile.name, ()))
    nodes = [n for n in model.graph if n.name in free and (n.op_type not in MOVEMENT or n.op_type in MERGING)]
    readers = _readers(nodes, bf16.weights, model.opset_imports[""])
    rank = {node: index for index, node in enumerate(model.graph.all_nodes())}
    positioned: list[tuple[float, Unit]] = []
    for name in sorted(bf16.weights - _requested(plan.tensors)):
        value = model.graph.initializers.get(name)
        uses = [] if value is None else [use.node for use in value.uses()]
        reading = readers.get(name, [])
        first = min((rank[node] for node in (*reading, *uses)), default=0)
        ops = ", ".join(sorted({label(node) for node in uses})) or "none"
        unit = Unit("weight", name, ops, _ISLAND + stored.get(name, 0.0), tuple(node.name or "" for node in reading))
        positioned.append((first - 0.5, unit))
    for node in nodes:
        unit = Unit("node", node.name or "", label(node), _ISLAND + flops.get(node.name or "", 0.0))
        positioned.append((rank[node], unit))
    return [unit for _, unit in sorted(positioned, key=lambda entry: (entry[0], entry[1].name))]


def flop_shares(model: ir.Model, shapes: Mapping[str, Shape]) -> Shares:
    """Return the share of each node of the main graph in its arithmetic, in floating-point operations.

    ``shapes`` are those of each node's first fp32 output when one sample was run. A product counts two per
    multiply-add, and any other node that computes floats one per element.
    """
    return _shares(
        {
            node.name or "": math.prod(shapes[node.name or ""]) * _per_element(node, shapes)
            for node in model.graph
            if (node.name or "") in shapes
        }
    )


def byte_shares(model: ir.Model, weights: Collection[str]) -> Shares:
    """Return the share of each of ``weights`` in the bytes of all."""
    stored = {name: value.const_value for name, value in model.graph.initializers.items() if name in weights}
    return _shares({name: tensor.nbytes for name, tensor in stored.items() if tensor is not None})


def share(shares: Shares, names: Iterable[str]) -> float:
    """Return the share of ``names`` together; fsum makes it independent of a set's order."""
    return math.fsum(shares.get(name, 0.0) for name in names)


def _per_element(node: ir.Node, shapes: Mapping[str, Shape]) -> int:
    if node.domain not in _PRODUCTS_DOMAINS:  # operators of other domains may have the same names, but other inputs
        return 1
    if node.op_type in ("MatMul", "Gemm", "FusedMatMul"):
        left = _shape(node.inputs[0], shapes)
        transposed = "transA" in node.attributes and node.attributes["transA"].as_int() == 1
        return 2 * (left[0 if transposed else -1] if left else 1)
    if node.op_type == "Conv":
        return 2 * math.prod(_shape(node.inputs[1], shapes)[1:])
    if node.op_type == "ConvTranspose":
        return 2 * math.prod(_shape(node.inputs[1], shapes)[2:]) * _shape(node.inputs[1], shapes)[0]
    if node.op_type in _GATES:
        widths = [_shape(value, shapes)[-1:] for value in node.inputs[1:3]]
        return 2 * _GATES[node.op_type] * sum(width[0] for width in widths if width)
    return 1


def _shape(value: ir.Value | None, shapes: Mapping[str, Shape]) -> Shape:
    """Return the shape as far as it is known, with 1 for each unknown dimension."""
    if value is None:
        return ()
    tensor, producer = const(value), value.producer()
    if tensor is not None:
        return dims(tensor)
    if producer is not None and producer.outputs[0] is value and (producer.name or "") in shapes:
        return shapes[producer.name or ""]
    return () if value.shape is None else tuple(d if isinstance(d, int) else 1 for d in value.shape)


def _shares(amounts: Mapping[str, int]) -> Shares:
    total = sum(amounts.values())
    return {name: amount / total if total else 0.0 for name, amount in amounts.items()}


def _readers(nodes: Iterable[ir.Node], weights: frozenset[str], opset: int) -> Mapping[str, list[ir.Node]]:
    """Return, for each weight, those of ``nodes`` that would round it if it were stored in fp32."""
    found: dict[str, list[ir.Node]] = {}
    for node in nodes:
        form = bf16_form(node, opset)
        for name in dict.fromkeys(moved_from(node.inputs[i], weights) for i in (form.inputs if form else ())):
            if name is not None:
                found.setdefault(name, []).append(node)
    return found


def _requested(entries: Iterable[PlanEntry]) -> frozenset[str]:
    return frozenset(entry.name for entry in entries if entry.code == "asked_for")
