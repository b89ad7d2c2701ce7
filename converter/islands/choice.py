"""Chooses islands: ranks the candidates by the error each causes, then finds a set that suffices and spares none.

Ranking: the candidates, in the order of the graph, form a binary tree. One run measures the error that one half alone
causes. The half with the largest error is split next, until the unsplit ones cause too little error to matter. With k
guilty units among n candidates, this takes about 2·k·log₂ n runs. If all candidates contribute a little, groups stay
together that cause an eighth of the tolerated variance or less: their units are worth about the same.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from converter.islands.candidates import Unit

Units = frozenset[Unit]

_SPLIT = 0.25  # share of the tolerated error; groups that together cause less than this are not split
_FINE = 1 / 8  # share of the tolerated variance; a group that causes less than this is not split
_NEGLIGIBLE = 1 / 64  # of the tolerated variance; groups that together leave less than this are taken in any order
_TRIALS = 20  # removals that are tried of each size


@dataclass(frozen=True, slots=True)
class Group:
    """Neighbouring units, and the relative error that they cause if they alone are bf16."""

    units: tuple[Unit, ...]
    error: float

    @property
    def variance(self) -> float:
        return self.error * self.error


def rank(
    units: Sequence[Unit], error: Callable[[Sequence[Unit]], float], tolerance: float, expired: Callable[[], bool]
) -> tuple[list[Group], bool]:
    """Split ``units`` into groups; return these in the units' order, and whether splitting was completed.

    ``error`` measures a set of units alone. ``tolerance`` is the error that all may cause together. Once ``expired``
    returns true, the remaining groups stay unsplit.
    """
    first = Group(tuple(units), error(units))
    places = {first: 0}
    waiting = [(-first.variance, 0, first)] if len(units) > 1 else []
    complete = True
    while waiting and sum(-v for v, _, _ in waiting) > (_SPLIT * tolerance) ** 2:
        complete = not expired()
        if not complete or -waiting[0][0] < _FINE * tolerance**2:
            break
        _, start, group = heapq.heappop(waiting)
        del places[group]
        middle = len(group.units) // 2
        for begin, part in ((start, group.units[:middle]), (start + middle, group.units[middle:])):
            half = Group(part, error(part))
            places[half] = begin
            if len(part) > 1:
                heapq.heappush(waiting, (-half.variance, begin, half))
    return sorted(places, key=places.__getitem__), complete


def smallest(groups: Sequence[Group], tolerance: float, suffices: Callable[[Units], bool]) -> Units | None:
    """Return a set of units that ``suffices`` and cannot spare any, or None if not even all units do.

    Bisection finds how many of the most rewarding steps suffice. Each set that suffices is smaller than the one before.
    """
    steps = steps_of(groups, tolerance)
    if not suffices(_union(steps)):
        return None
    low, high = 0, len(steps)  # steps[:high] suffice
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(_union(steps[:middle])) else (middle, high)
    return _pruned(_in_order(steps[:high]), suffices)


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


def steps_of(groups: Sequence[Group], tolerance: float) -> list[Units]:
    """Return sets of units in the order to keep them in fp32: by the variance that each removes per cost.

    A weight comes with the nodes that read it. Units that were not told apart come together.
    """
    by_name = {(unit.kind, unit.name): place for place, group in enumerate(groups) for unit in group.units}
    readers = [
        [by_name["node", name] for unit in group.units for name in unit.readers if ("node", name) in by_name]
        for group in groups
    ]
    steps: list[Units] = []
    waiting = dict.fromkeys(range(len(groups)))

    def step(place: int) -> list[int]:
        return [place, *(each for each in dict.fromkeys(readers[place]) if each in waiting and each != place)]

    def order(place: int) -> tuple[float, float, int]:
        members = step(place)
        gain, price = sum(groups[each].variance for each in members), sum(_cost(groups[each].units) for each in members)
        return -(gain if math.isinf(gain) else gain / price), price, place

    while waiting:
        one_at_a_time = sum(groups[place].variance for place in waiting) > _NEGLIGIBLE * tolerance**2
        for place in sorted(waiting, key=order)[: 1 if one_at_a_time else None]:
            if place in waiting:
                members = step(place)
                steps.append(frozenset(unit for each in members for unit in groups[each].units))
                for each in members:
                    del waiting[each]
    return steps


def _cost(units: Iterable[Unit]) -> float:
    """Return the total that ``units`` withhold from bf16; fsum makes it independent of their order."""
    return math.fsum(unit.cost for unit in units)


def _in_order(steps: Iterable[Units]) -> list[Unit]:
    """Return the units of ``steps``, each once. Within a step they are sorted by name, because a set's order changes
    from process to process."""
    by_name = (sorted(step, key=lambda unit: (unit.kind, unit.name)) for step in steps)
    return list(dict.fromkeys(unit for step in by_name for unit in step))


def _union(steps: Sequence[Units]) -> Units:
    return frozenset(unit for step in steps for unit in step)
