"""The candidates for islands, the choice of a set that spares none, and that set as the result of a search.

Ranking: the candidates, in the order of the graph, form a binary tree. One run measures the error that one half alone
causes. The half with the largest error is split next, until the unsplit ones cause too little error to matter. With k
guilty units among n candidates, this takes about 2·k·log₂ n runs. If all candidates contribute a little, groups stay
together that cause an eighth of the tolerated variance or less: their units are worth about the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import onnx_ir as ir

from bf16kit.artifact.manifest import Plan, PlanEntry
from bf16kit.converter.graph.operators import MERGING, MOVEMENT, bf16_form, label
from bf16kit.converter.islands.switches import Bf16, Shares, moved_from, share
from bf16kit.converter.plan import narrowed
from bf16kit.converter.plan.decisions import Islands
from bf16kit.converter.plan.profiles import Profile
from bf16kit.drift.budget import Breach
from bf16kit.drift.measurements import IslandEntry, SearchEntry

_ISLAND = 1e-4  # the fixed price of an island, beside its bytes and arithmetic: casts, and a line in the report
_SPLIT = 0.25  # share of the tolerated error; groups that together cause less than this are not split
_FINE = 1 / 8  # share of the tolerated variance; a group that causes less than this is not split
_TRIALS = 20  # removals that are tried of each size
_LARGER = (1 / 2, 1 / 4, 1 / 8)  # of the variance that the smallest set leaves, what larger ones leave
_MAX_ROWS = 12  # islands named on the terminal
_REMEDIES = {"node": "computes in fp32", "weight": "stored in fp32"}


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
    rank = {node: float(index) for index, node in enumerate(model.graph.all_nodes())}
    placed = [(rank[n], Unit("node", n.name or "", label(n), _ISLAND + flops.get(n.name or "", 0.0))) for n in nodes]
    for name in bf16.weights - _requested(plan.tensors):
        value, reading = model.graph.initializers.get(name), readers.get(name, [])
        uses = [] if value is None else [use.node for use in value.uses()]
        first = min((rank[node] for node in (*reading, *uses)), default=0.0)
        ops = ", ".join(sorted({label(node) for node in uses})) or "none"
        unit = Unit("weight", name, ops, _ISLAND + stored.get(name, 0.0), tuple(node.name or "" for node in reading))
        placed.append((first - 0.5, unit))
    return [unit for _, unit in sorted(placed, key=lambda entry: (entry[0], entry[1].name))]


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
    tolerance = min(tolerance, groups[0].error)  # all may be within budget here, and not in the written graph
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


def larger(units: Sequence[Unit], groups: Sequence[Group], found: Units) -> list[Units]:
    """Return ``found`` and larger sets: some that leave ever less of its variance, all nodes, and all ``units``.

    They are for a set that suffices only on the samples, or only in the graph, that it was tried on.
    """

    def left(kept: Units) -> float:
        return math.fsum(group.variance for group in groups if not kept.issuperset(group.units))

    sets, most, steps = [found], left(found), iter(_steps(groups))
    for part in _LARGER:
        kept = sets[-1]
        while not left(kept) < part * most and (step := next(steps, None)) is not None:
            kept |= step
        sets.append(kept)
    nodes = sets[-1].union(unit for unit in units if unit.kind == "node")
    return list(dict.fromkeys([*sets, nodes, frozenset(units)]))


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


# --- the result of a search -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Island:
    """A node or weight that stays fp32.

    ``breach`` is where the search's share of the budget was exceeded without it, ``ratio`` the drift ÷ budget then, and
    ``with_it`` the judged figure with the island; None or NaN if the other islands were not tried without this one.
    """

    unit: Unit
    breach: Breach | None = None
    with_it: float = math.nan
    ratio: float = math.nan

    def worth(self) -> str:
        """Return what the island is worth, as ``relative_l2 2.1e-02 → 1.2e-02``; "" if it was not measured."""
        return f"{self.breach.metric} {self.breach.measured:.3g} → {self.with_it:.3g}" if self.breach else ""

    def reason(self, profile: str) -> str:
        """Return the reason it stays fp32, for the plan."""
        tried = f"the search measured {self.worth()}" if self.breach else "the search did not try it alone"
        return f"kept in fp32 to meet the budget of {profile}; {tried}"

    def entry(self) -> IslandEntry:
        """Return this as ``measurements.json`` stores it."""
        return IslandEntry(name=self.unit.name, op=self.unit.op, remedy=_REMEDIES[self.unit.kind], worth=self.ratio)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The islands found for ``profile`` among ``candidates``.

    ``before`` and ``after`` are drift ÷ budget. ``bf16`` is what is bf16 with the islands, and ``flops`` and ``stored``
    are the shares of all nodes and of all weights. ``sqnr_*`` is the SQNR in dB by output. ``complete`` is false if
    time ran out before a small set was found. ``error`` says why nothing was found; "" if something was. ``larger`` are
    results with more islands each, to be written in turn if running the written graph does not confirm this one.
    """

    profile: str
    islands: tuple[Island, ...] = ()
    candidates: int = 0
    before: float = math.nan
    after: float = math.nan
    flops: Shares = field(default_factory=dict)
    stored: Shares = field(default_factory=dict)
    bf16: Bf16 = field(default_factory=Bf16)
    sqnr_before: Mapping[str, float] = field(default_factory=dict)
    sqnr_now: Mapping[str, float] = field(default_factory=dict)
    complete: bool = True
    error: str = ""
    larger: tuple[SearchResult, ...] = ()

    @property
    def entry(self) -> SearchEntry:
        """The entry for ``measurements.json``."""
        return SearchEntry(
            candidates=self.candidates,
            before=self.before,
            after=self.after,
            islands=[island.entry() for island in self.islands],
            bf16_bytes=share(self.stored, self.bf16.weights),
            bf16_flops=share(self.flops, self.bf16.nodes),
        )

    @property
    def notes(self) -> list[str]:
        """Sentences for the user that the measurements do not hold."""
        return [] if self.complete else [_NOT_MINIMAL.format(self.profile)]

    @property
    def keep_fp32(self) -> list[str]:
        """The names for ``--keep-fp32``; without weights that a named node reads, because it keeps these as well."""
        units = [island.unit for island in self.islands]
        nodes = {unit.name for unit in units if unit.kind == "node"}
        return [unit.name for unit in units if not nodes & set(unit.readers)]

    def sentences(self) -> list[str]:
        """Return the sentences for the user: which islands, what they are worth, and how much is bf16 now."""
        entry = self.entry
        shares = f"{entry.bf16_bytes:.1%} of the weights' bytes"
        if entry.bf16_flops:
            shares += f" and {entry.bf16_flops:.1%} of the arithmetic"
        count = "one node or weight" if len(self.islands) == 1 else f"{len(self.islands)} nodes and weights"
        rows = [
            f"\n  {i.unit.kind} {i.unit.name} ({i.unit.op}){': ' if i.breach else ''}{i.worth()}"
            for i in self.islands[:_MAX_ROWS]
        ]
        if len(self.islands) > _MAX_ROWS:
            rows.append(f"\n  and {len(self.islands) - _MAX_ROWS} more, in the plan")
        found = f"profile {self.profile} was over budget; keeping {count} in fp32 brought it within: bf16 now holds"
        return [f"{found} {shares}{''.join(rows)}", *self.notes]


def merged(results: Iterable[SearchResult]) -> Islands:
    """Return the islands of all profiles as the plan takes them; if several name one, the first gives the reason."""
    nodes: dict[str, str] = {}
    tensors: dict[str, str] = {}
    for result in results:
        for island in result.islands:
            of_kind = nodes if island.unit.kind == "node" else tensors
            of_kind.setdefault(island.unit.name, island.reason(result.profile))
    return Islands(nodes, tensors)


_NOT_MINIMAL = (
    "profile {}: these islands bring it within budget, but some may be unnecessary, because the search ran out of"
    " time. Another run may find other islands; allow more time with --search-minutes"
)
