"""The result of a search: the islands, what each is worth, and how much of the model is bf16 with them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from bf16kit.drift.measurements import IslandEntry, SearchEntry
from converter.islands.ranking import Group
from converter.plan.decisions import Islands

_MAX_ROWS = 12
_REMEDIES = {"node": "computes in fp32", "weight": "stored in fp32"}


@dataclass(frozen=True, slots=True)
class Island:
    """A node or weight that stays fp32.

    ``bound`` is the budget's bound that would be exceeded without it. ``without`` and ``with_it`` are the judged
    figures of ``output`` without and with the island, and ``ratio`` is drift ÷ budget without it. These are "" or None
    if the other islands were not tried without this one. ``flops`` and ``bytes`` are the shares of the model's
    arithmetic and of its weights' bytes that the island withholds from bf16.
    """

    kind: Literal["node", "weight"]
    name: str
    op: str
    output: str
    bound: str
    without: float | None
    with_it: float | None
    ratio: float | None
    flops: float
    bytes: float

    def worth(self) -> str:
        """Return what the island is worth, as ``relative_l2 2.1e-02 → 1.2e-02``; "" if it was not measured."""
        if self.without is None or self.with_it is None:
            return ""
        return f"{self.bound} {_number(self.without)} → {_number(self.with_it)}"

    def reason(self, profile: str) -> str:
        """Return the reason it stays fp32, for the plan."""
        if not self.worth():
            return f"kept in fp32: one of the islands with which {profile} is within budget; it was not tried alone"
        return f"kept in fp32: {profile} is over budget without it ({self.worth()})"


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The islands found for ``profile``; ``candidates`` counts what was searched.

    ``flops_*`` and ``bytes_*`` are the shares of arithmetic and of weights' bytes in bf16 before the search and now.
    ``drift_*`` are the largest drift ÷ budget. ``complete`` is false if time ran out before a small set was found.
    ``notes`` are sentences for the user. ``error`` says why nothing was found; "" if something was. ``ranking`` has the
    candidates with the error each group causes alone.
    """

    profile: str
    islands: tuple[Island, ...] = ()
    candidates: int = 0
    flops_before: float = 0.0
    flops_now: float = 0.0
    bytes_before: float = 0.0
    bytes_now: float = 0.0
    drift_before: float = 0.0
    drift_now: float = 0.0
    complete: bool = True
    notes: tuple[str, ...] = ()
    error: str = ""
    ranking: tuple[Group, ...] = ()

    def as_islands(self) -> Islands:
        """Return the islands as the plan takes them: nodes and tensors separately, each with its reason."""
        reasons = {kind: self._reasons(kind) for kind in ("node", "weight")}
        return Islands(reasons["node"], reasons["weight"])

    def entry(self) -> SearchEntry:
        """Return this as ``measurements.json`` stores it."""
        return SearchEntry(
            candidates=self.candidates,
            before=self.drift_before,
            after=self.drift_now,
            islands=[
                IslandEntry(
                    name=i.name, op=i.op, remedy=_REMEDIES[i.kind], worth=math.nan if i.ratio is None else i.ratio
                )
                for i in self.islands
            ],
            bf16_bytes=self.bytes_now,
            bf16_flops=self.flops_now,
        )

    def sentences(self) -> list[str]:
        """Return the sentences for the user: which islands, what they are worth, and how much is bf16 now."""
        if not self.islands:
            return list(self.notes)
        rows = [
            f"\n  {i.kind} {i.name} ({i.op}){': ' if i.worth() else ''}{i.worth()}" for i in self.islands[:_MAX_ROWS]
        ]
        if len(self.islands) > _MAX_ROWS:
            rows.append(f"\n  and {len(self.islands) - _MAX_ROWS} more, in the plan")
        shares = f"{self.bytes_now:.1%} of the weights' bytes ({self.bytes_before:.1%} before)"
        if self.flops_before:
            shares += f" and {self.flops_now:.1%} of the arithmetic ({self.flops_before:.1%} before)"
        count = "1 island" if len(self.islands) == 1 else f"{len(self.islands)} islands"
        found = (
            f"profile {self.profile} was over budget; {count} in fp32 brought it within budget: bf16 now holds {shares}"
        )
        return [found + "".join(rows), *self.notes]

    def _reasons(self, kind: str) -> dict[str, str]:
        return {island.name: island.reason(self.profile) for island in self.islands if island.kind == kind}


def merged(results: Iterable[SearchResult]) -> Islands:
    """Merge the islands of all profiles; if several name the same island, the first gives the reason."""
    nodes: dict[str, str] = {}
    tensors: dict[str, str] = {}
    for result in results:
        found = result.as_islands()
        nodes = dict(found.nodes) | nodes
        tensors = dict(found.tensors) | tensors
    return Islands(nodes, tensors)


def _number(value: float) -> str:
    return f"{value:.3g}"
