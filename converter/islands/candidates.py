"""The candidates for islands, what keeping each in fp32 would cost, and the choice of a set that spares none.

Ranking: the candidates, in the order of the graph, form a binary tree. One run measures the error that one half alone
causes. The half with the largest error is split next, until the unsplit ones cause too little error to matter. With k
guilty units among n candidates, this takes about 2·k·log₂ n runs. If all candidates contribute a little, groups stay
together that cause an eighth of the tolerated variance or less: their units are worth about the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
_SPLIT = 0.25  # share of the tolerated error; groups that together cause less than this are not split
_FINE = 1 / 8  # share of the tolerated variance; a group that causes less than this is not split
_TRIALS = 20  # removals that are tried of each size


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


Units = frozenset[Unit]


@dataclass(frozen=True, slots=True)
class Group:
    """Neighbouring units, and the relative error that they cause if they alone are bf16."""

    units: tuple[Unit, ...]
    error: float

    @property
    def variance(self) -> float:
        return self.error * self.error


def bf16_of(plan: Plan, profile: Profile) -> Bf16:
    """Return the nodes and weights of ``profile`` that are bf16 by ``plan``."""
    nodes = plan.nodes[profile.name] if profile.rounds else ()
    return Bf16(narrowed(nodes), narrowed(plan.tensors))


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
    placed: list[tuple[float, Unit]] = []
    for node in nodes:
        unit = Unit("node", node.name or "", label(node), _ISLAND + flops.get(node.name or "", 0.0))
        placed.append((rank[node], unit))
    for name in bf16.weights - _requested(plan.tensors):
        value, reading = model.graph.initializers.get(name), readers.get(name, [])
        uses = [] if value is None else [use.node for use in value.uses()]
        first = min((rank[node] for node in (*reading, *uses)), default=0)
        ops = ", ".join(sorted({label(node) for node in uses})) or "none"
        unit = Unit("weight", name, ops, _ISLAND + stored.get(name, 0.0), tuple(node.name or "" for node in reading))
        placed.append((first - 0.5, unit))
    return [unit for _, unit in sorted(placed, key=lambda entry: (entry[0], entry[1].name))]


def flop_shares(model: ir.Model, shapes: Mapping[str, Shape]) -> Shares:
    """Return the share of each node of the main graph in its arithmetic, in floating-point operations.

    ``shapes`` are those of each node's first fp32 output when one sample was run. A product counts two per
    multiply-add, and any other node that computes floats one per element.
    """
    nodes = {node.name or "": node for node in model.graph}
    return _shares({name: math.prod(shape) * _per_element(nodes[name], shapes) for name, shape in shapes.items()})


def byte_shares(model: ir.Model, weights: Collection[str]) -> Shares:
    """Return the share of each of ``weights`` in the bytes of all."""
    stored = {name: value.const_value for name, value in model.graph.initializers.items() if name in weights}
    return _shares({name: tensor.nbytes for name, tensor in stored.items() if tensor is not None})


def share(shares: Shares, names: Iterable[str]) -> float:
    """Return the share of ``names`` together; fsum makes it independent of a set's order."""
    return math.fsum(shares.get(name, 0.0) for name in names)


def _per_element(node: ir.Node, shapes: Mapping[str, Shape]) -> int:
    op = node.op_type if node.domain in ("", "com.microsoft") else ""  # others may have the names, but other inputs
    first, second, third = (_shape(value, shapes) for value in (*node.inputs, None, None, None)[:3])
    if op in ("MatMul", "Gemm", "FusedMatMul"):
        transposed = "transA" in node.attributes and node.attributes["transA"].as_int() == 1
        return 2 * (first[0 if transposed else -1] if first else 1)
    if op == "Conv":
        return 2 * math.prod(second[1:])
    if op == "ConvTranspose":
        return 2 * math.prod(second[2:]) * second[0]
    if op in _GATES:
        return 2 * _GATES[op] * sum((*second[-1:], *third[-1:]))
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


def rank(
    units: Sequence[Unit], error: Callable[[Sequence[Unit]], float], tolerance: float, expired: Callable[[], bool]
) -> tuple[list[Group], bool]:
    """Split ``units`` into groups; return these in the units' order, and whether splitting was completed.

    ``error`` measures a set of units alone. ``tolerance`` is the error that all may cause together. Once ``expired``
    returns true, the remaining groups stay unsplit.
    """
    groups = [Group(tuple(units), error(units))]
    while True:
        large = [place for place, group in enumerate(groups) if len(group.units) > 1]
        if sum(groups[place].variance for place in large) <= (_SPLIT * tolerance) ** 2:
            return groups, True
        if expired():
            return groups, False
        worst = max(large, key=lambda place: groups[place].variance)
        if groups[worst].variance < _FINE * tolerance**2:
            return groups, True
        members = groups[worst].units
        middle = len(members) // 2
        groups[worst : worst + 1] = [Group(half, error(half)) for half in (members[:middle], members[middle:])]


def smallest(groups: Sequence[Group], suffices: Callable[[Units], bool]) -> Units | None:
    """Return a set of units that ``suffices`` and cannot spare any, or None if not even all units do.

    Bisection finds how many of the most rewarding steps suffice. Each set that suffices is smaller than the one before.
    """
    steps = _steps(groups)
    if not suffices(frozenset().union(*steps)):
        return None
    low, high = 0, len(steps)  # steps[:high] suffice
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(frozenset().union(*steps[:middle])) else (middle, high)
    # sorted, because a set's order changes from process to process
    by_name = (sorted(step, key=lambda unit: (unit.kind, unit.name)) for step in steps[:high])
    return _pruned(list(dict.fromkeys(unit for step in by_name for unit in step)), suffices)


def _pruned(order: Sequence[Unit], suffices: Callable[[Units], bool]) -> Units:
    """Remove units that are not needed, the least rewarding first: by halves, by quarters, … and one by one.

    Each size has :data:`_TRIALS`: what follows is more rewarding, and trying each of hundreds of islands would find
    little. Fewer units are tried until none can be removed.
    """
    left = list(reversed(order))
    size = max(1, len(left) // 2)
    while True:
        before, position, trials = len(left), 0, 0
        while position < len(left) and trials < _TRIALS:
            remaining = left[:position] + left[position + size :]
            trials += 1
            if suffices(frozenset(remaining)):
                left = remaining
            else:
                position += size
        if size == 1 and (len(left) == before or position < len(left)):
            return frozenset(left)
        size = max(1, size // 2)


def _steps(groups: Sequence[Group]) -> list[Units]:
    """Return sets of units in the order to keep them in fp32: by the variance that each removes per cost.

    A weight comes with the nodes that read it. Units that were not told apart come together.
    """
    by_name = {unit.name: place for place, group in enumerate(groups) for unit in group.units if unit.kind == "node"}
    readers = [[by_name[name] for unit in group.units for name in unit.readers if name in by_name] for group in groups]
    prices = [math.fsum(unit.cost for unit in group.units) for group in groups]
    steps: list[Units] = []
    waiting = dict.fromkeys(range(len(groups)))

    def members(place: int) -> list[int]:
        return [place, *(each for each in dict.fromkeys(readers[place]) if each in waiting and each != place)]

    def order(place: int) -> tuple[float, float, int]:
        together = members(place)
        gain, price = sum(groups[each].variance for each in together), sum(prices[each] for each in together)
        return -(gain if math.isinf(gain) else gain / price), price, place

    while waiting:
        together = members(min(waiting, key=order))
        steps.append(frozenset(unit for place in together for unit in groups[place].units))
        for place in together:
            del waiting[place]
    return steps
