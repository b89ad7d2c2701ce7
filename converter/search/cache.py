"""The results of earlier searches of one profile, kept for the next search, which has less of the budget."""

from __future__ import annotations

from dataclasses import dataclass, field

from converter.proof.measure import Drifts
from converter.search.choice import Units
from converter.search.ranking import Group


@dataclass(slots=True)
class SearchCache:
    """``before`` is the drift without islands. ``groups`` are the candidates as ranked; ``ranked`` is false if time ran
    out. ``tried`` has the drifts of every set of islands that was tried, by the samples it was tried on.

    It stays valid while the graph, the islands that exist already, and the samples are the same.
    """

    before: list[Drifts] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    ranked: bool = True
    tried: dict[tuple[Units, tuple[int, ...]], list[Drifts]] = field(default_factory=dict)
