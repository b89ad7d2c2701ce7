"""Chooses islands: from the error that each unit causes to a set that suffices and cannot spare any unit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from converter.islands.ranking import Group, Unit

_NEGLIGIBLE = 1 / 64  # of the tolerated variance; groups that together leave less than this are taken in any order
_TRIALS = 20  # removals that are tried of each size

Units = frozenset[Unit]


class MinimalSetFinder:
    """Finds a small set of islands. ``within_budget`` tells whether a set meets the budget.

    ``found`` is the smallest known set that does; None if there is none yet. ``known`` has every set that was tried.
    """

    def __init__(self, within_budget: Callable[[Units], bool]) -> None:
        self._within_budget = within_budget
        self.known: dict[Units, bool] = {}
        self.found: Units | None = None

    def find(self, groups: Sequence[Group], tolerance: float) -> Units | None:
        """Return a set that suffices, or None if not even all units do."""
        steps = steps_of(groups, tolerance)
        if not self._try(_union(steps)):
            return None
        low, high = 0, len(steps)  # steps[:high] suffice
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._try(_union(steps[:middle])) else (middle, high)
        return self._prune(_in_order(steps[:high]))

    def _prune(self, order: list[Unit]) -> Units:
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
                if self._try(frozenset(remaining)):
                    left = remaining
                else:
                    position += size
            if size == 1 and (len(left) == before or position < len(left)):
                return frozenset(left)
            size = max(1, size // 2)

    def _try(self, units: Units) -> bool:
        if units not in self.known:
            self.known[units] = self._within_budget(units)
            if self.known[units]:
                self.found = units
        return self.known[units]


def steps_of(groups: Sequence[Group], tolerance: float) -> list[Units]:
    """Return sets of units in the order to keep them in fp32: by the variance that each removes per cost.

    A weight comes with the nodes that read it. Units that were not told apart come together.
    """
    parts = [_PendingGroup(group, index) for index, group in enumerate(groups)]
    by_name = {(unit.kind, unit.name): part for part in parts for unit in part.units}
    for part in parts:
        part.needs = {id(p): p for u in part.units for r in u.readers if (p := by_name.get(("node", r))) is not None}
    steps: list[Units] = []
    waiting = {id(part): part for part in parts}
    while waiting:
        one_at_a_time = sum(part.variance for part in waiting.values()) > _NEGLIGIBLE * tolerance**2
        ordered = sorted(waiting.values(), key=lambda part: part.rank(waiting))
        for part in ordered[:1] if one_at_a_time else ordered:
            weight_readers = [p for key, p in part.needs.items() if key in waiting and p is not part]
            if id(part) in waiting:
                steps.append(frozenset(u for p in (part, *weight_readers) for u in p.units))
            for done in (part, *weight_readers):
                waiting.pop(id(done), None)
    return steps


class _PendingGroup:
    """A group that is to become a step."""

    def __init__(self, group: Group, index: int) -> None:
        self.units = group.units
        self.variance = group.variance
        self.index = index
        self.needs: dict[int, _PendingGroup] = {}

    def rank(self, waiting: dict[int, _PendingGroup]) -> tuple[float, float, int]:
        weight_readers = [part for key, part in self.needs.items() if key in waiting and part is not self]
        gain = self.variance + sum(part.variance for part in weight_readers)
        price = cost(self.units) + sum(cost(part.units) for part in weight_readers)
        ratio = gain if math.isinf(gain) else gain / price
        return -ratio, price, self.index


def cost(units: Iterable[Unit]) -> float:
    """Return the total that ``units`` withhold from bf16; fsum makes it independent of a set's order."""
    return math.fsum(unit.cost for unit in units)


def _in_order(steps: Iterable[Units]) -> list[Unit]:
    """Return the units of ``steps``, each once. Within a step they are sorted by name, because a set's order changes
    from process to process."""
    by_name = (sorted(step, key=lambda unit: (unit.kind, unit.name)) for step in steps)
    return list(dict.fromkeys(unit for step in by_name for unit in step))


def _union(steps: Sequence[Units]) -> Units:
    return frozenset(unit for step in steps for unit in step)
