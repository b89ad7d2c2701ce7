"""Measures where the error of a plan comes from: the share of each node and weight, in few runs.

The candidates, in the order of the graph, form a binary tree. One run measures the error that one half alone causes.
The half with the largest error is split next, until the unsplit ones cause too little error to matter. With k guilty
units among n candidates, this takes about 2·k·log₂ n runs. If all candidates contribute a little, groups stay together
that cause an eighth of the tolerated variance or less: their units are worth about the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

_NEGLIGIBLE = 0.25  # share of the tolerated error; groups that together cause less than this are not split
_FINE = 1 / 8  # share of the tolerated variance; a group that causes less than this is not split


@dataclass(frozen=True, slots=True)
class Unit:
    """A candidate for fp32: a node, or a weight with the nodes that would then have to compute in fp32 too.

    ``cost`` is what it withholds from bf16: its share of the graph's arithmetic, or of the weights' bytes.
    """

    kind: Literal["node", "weight"]
    name: str
    op: str
    cost: float
    readers: tuple[str, ...] = ()


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
    while waiting and sum(-v for v, _, _ in waiting) > (_NEGLIGIBLE * tolerance) ** 2:
        if expired():
            return sorted(places, key=places.__getitem__), False
        if -waiting[0][0] < _FINE * tolerance**2:
            break
        _, start, group = heapq.heappop(waiting)
        del places[group]
        middle = len(group.units) // 2
        for begin, part in ((start, group.units[:middle]), (start + middle, group.units[middle:])):
            half = Group(part, error(part))
            places[half] = begin
            if len(part) > 1:
                heapq.heappush(waiting, (-half.variance, begin, half))
    return sorted(places, key=places.__getitem__), True
