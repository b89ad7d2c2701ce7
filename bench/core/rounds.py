"""Sides that take turns, in rounds of fresh processes: how often, in which order, and what was found as samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, permutations

from bench.core.verdict import Samples

Turn = Mapping[str, float]  # what one turn found, by name
Round = Mapping[str, Sequence[Turn]]  # by side


@dataclass(frozen=True, slots=True)
class Effort:
    """``rounds`` of fresh processes, in each of them ``turns`` of every side, of ``seconds`` each."""

    rounds: int
    turns: int
    seconds: float


def take_turns(sides: Mapping[str, Callable[[], Turn]], turns: int) -> Round:
    """One round: ``turns`` of each of ``sides``."""
    found: dict[str, list[Turn]] = {side: [] for side in sides}
    for order in islice(cycle(_orders(sides)), turns):
        for side in order:
            found[side].append(sides[side]())
    return found


def _orders(sides: Iterable[str]) -> Iterator[Sequence[str]]:
    """Every order, each followed by its reverse: what changes steadily falls on all sides alike."""
    for order in permutations(sides):
        if order <= order[::-1]:
            yield from (order, order[::-1])


def samples(rounds: Sequence[Round], what: str) -> dict[str, Samples]:
    """``what`` by side, process and turn, as :mod:`bench.core.verdict` takes it; rates and percentiles alike."""
    return {side: [[[turn[what]] for turn in found[side]] for found in rounds] for side in rounds[0]}
