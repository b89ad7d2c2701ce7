"""The candidates for islands: nodes that compute in bf16 and weights stored in it, in the graph's order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir

from bf16kit.artifact.manifest import Plan, PlanEntry
from converter.graph.operators import MERGING, MOVEMENT, bf16_form, label
from converter.islands.costs import Costs
from converter.islands.ranking import Unit
from converter.islands.switches import moved_from
from converter.islands.trials import Bf16
from converter.plan import narrowed
from converter.plan.profiles import Profile

_ISLAND = 1e-4  # the fixed price of an island, beside its bytes and arithmetic: casts, and a line in the report


def bf16_of(plan: Plan, profile: Profile) -> Bf16:
    """Return the nodes and weights of ``profile`` that are bf16 by ``plan``."""
    nodes = _names(plan.nodes[profile.name]) if profile.rounds else frozenset()
    return Bf16(nodes, narrowed(plan.tensors))


def candidates(model: ir.Model, plan: Plan, profile: Profile, costs: Costs) -> list[Unit]:
    """Return the units of ``model``, the base graph of ``profile``; a weight comes before the first node that reads it.

    Units that ``--bf16`` asked for are left out, and so are nodes that move bf16 data: they follow the data's
    precision.
    """
    bf16 = bf16_of(plan, profile)
    requested = _requested(plan.tensors)
    free = bf16.nodes - _requested(plan.nodes.get(profile.name, ()))
    nodes = [n for n in model.graph if n.name in free and (n.op_type not in MOVEMENT or n.op_type in MERGING)]
    readers = _readers(nodes, bf16.weights, model.opset_imports[""])
    rank = {node: index for index, node in enumerate(model.graph.all_nodes())}
    positioned: list[tuple[float, Unit]] = []
    for name in sorted(bf16.weights - requested):
        value = model.graph.initializers.get(name)
        uses = [] if value is None else [use.node for use in value.uses()]
        first = min((rank[node] for node in (*readers.get(name, ()), *uses)), default=0)
        ops = ", ".join(sorted({label(node) for node in uses})) or "none"
        price = _ISLAND + costs.bytes_share(frozenset({name}))
        unit = Unit("weight", name, ops, price, tuple(node.name or "" for node in readers.get(name, ())))
        positioned.append((first - 0.5, unit))
    for node in nodes:
        price = _ISLAND + costs.flops_share(frozenset({node.name or ""}))
        positioned.append((rank[node], Unit("node", node.name or "", label(node), price)))
    return [unit for _, unit in sorted(positioned, key=lambda entry: (entry[0], entry[1].name))]


def bf16_alone(units: Iterable[Unit]) -> Bf16:
    """Return the nodes and weights among ``units`` as a plan in which only they are bf16."""
    chosen = list(units)
    return Bf16(
        frozenset(unit.name for unit in chosen if unit.kind == "node"),
        frozenset(unit.name for unit in chosen if unit.kind == "weight"),
    )


def _readers(nodes: Iterable[ir.Node], weights: frozenset[str], opset: int) -> Mapping[str, list[ir.Node]]:
    """Return, for each weight, those of ``nodes`` that would round it if it were stored in fp32."""
    found: dict[str, list[ir.Node]] = {}
    for node in nodes:
        form = bf16_form(node, opset)
        for name in dict.fromkeys(moved_from(node.inputs[i], weights) for i in (form.inputs if form else ())):
            if name is not None:
                found.setdefault(name, []).append(node)
    return found


def _names(entries: Iterable[PlanEntry]) -> frozenset[str]:
    return frozenset(entry.name for entry in entries if entry.precision == "bf16")


def _requested(entries: Iterable[PlanEntry]) -> frozenset[str]:
    return frozenset(entry.name for entry in entries if entry.code == "asked_for")
