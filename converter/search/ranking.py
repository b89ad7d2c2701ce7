"""Where the error of a plan comes from: the share of each node and weight, measured in few runs.

The candidates in the order of the graph are a tree of halves. The error that a half brings about alone is one run; the
half with the largest one is parted next, until those that are not parted bring about too little to matter. With k
guilty ones among n candidates that takes some 2·k·log₂ n runs; errors that are spread over all of them take 2·n.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

_NEGLIGIBLE = 0.25  # share of the tolerated error; groups that together cause less than this are not parted


@dataclass(frozen=True, slots=True)
class Unit:
    """Something that could stay fp32: a node, or a weight with the nodes that would have to compute in fp32, too.

    ``cost`` is what it keeps from bf16: its share of the graph's arithmetic, or of the weights' bytes.
    """

    kind: Literal["node", "weight"]
    name: str
    op: str
    cost: float
    readers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """Neighbouring units, and the relative error that they bring about when they alone are bf16."""

    units: tuple[Unit, ...]
    error: float

    @property
    def variance(self) -> float:
        return self.error * self.error


def rank(
    units: Sequence[Unit], error: Callable[[Sequence[Unit]], float], tolerance: float, over: Callable[[], bool]
) -> tuple[list[Group], bool]:
    """The groups that ``units`` were parted into, in their order, and whether that was all that there was to part.

    ``error`` measures some units alone, ``tolerance`` is the error that all may bring about together, and ``over`` says
    that there is no time left: what could not be parted then stays together.
    """
    first = Group(tuple(units), error(units))
    places = {first: 0}
    waiting = [(-first.variance, 0, first)] if len(units) > 1 else []
    while waiting and sum(-v for v, _, _ in waiting) > (_NEGLIGIBLE * tolerance) ** 2:
        if over():
            return sorted(places, key=places.__getitem__), False
        _, start, group = heapq.heappop(waiting)
        del places[group]
        middle = len(group.units) // 2
        for begin, part in ((start, group.units[:middle]), (start + middle, group.units[middle:])):
            half = Group(part, error(part))
            places[half] = begin
            if len(part) > 1:
                heapq.heappush(waiting, (-half.variance, begin, half))
    return sorted(places, key=places.__getitem__), True
