"""Choosing a set of islands: the order of removal does not depend on how a process orders its sets."""

from __future__ import annotations

import math
import random

from converter.islands.choice import MinimalSetFinder, Units, cost
from converter.islands.ranking import Group, Unit


def unit(name: str, price: float = 0.1) -> Unit:
    return Unit("node", name, "Add", price)


def test_units_of_one_group_are_removed_in_reverse_order_of_their_names() -> None:
    names = [f"n{i:02}" for i in range(32)]
    random.Random(0).shuffle(names)
    tried: list[Units] = []

    def within_budget(units: Units) -> bool:
        tried.append(units)
        return len(units) >= 16

    found = MinimalSetFinder(within_budget).find([Group(tuple(map(unit, names)), 1.0)], 0.1)
    assert found is not None
    assert sorted(each.name for each in found) == sorted(names)[:16], "the last ones are taken out first"


def test_hundreds_of_islands_that_are_all_needed_take_few_trials() -> None:
    units = [unit(f"n{i}") for i in range(256)]
    tried: list[Units] = []

    def within_budget(chosen: Units) -> bool:
        tried.append(chosen)
        return len(chosen) == len(units)

    groups = [Group((each,), 1.0) for each in units]
    assert MinimalSetFinder(within_budget).find(groups, 0.1) == frozenset(units)
    assert len(tried) < 120


def test_the_cost_of_a_set_is_the_same_in_any_order() -> None:
    units = [unit(f"n{i}", math.pi**-i) for i in range(40)]
    costs = {cost(random.Random(seed).sample(units, len(units))) for seed in range(50)}
    assert len(costs) == 1
