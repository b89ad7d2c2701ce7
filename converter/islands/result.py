"""The result of a search: the islands, what each is worth, and how much of the model is bf16 with them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from bf16kit.drift.budget import Breach
from bf16kit.drift.measurements import IslandEntry, SearchEntry
from converter.islands.candidates import Unit
from converter.plan.decisions import Islands

_MAX_ROWS = 12
_REMEDIES = {"node": "computes in fp32", "weight": "stored in fp32"}


@dataclass(frozen=True, slots=True)
class Island:
    """A node or weight that stays fp32.

    ``breach`` is where the budget would be exceeded without it, ``ratio`` the drift ÷ budget then, and ``with_it`` the
    judged figure with the island; None or NaN if the other islands were not tried without this one.
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
        if self.breach is None:
            return f"kept in fp32: one of the islands with which {profile} is within budget; it was not tried alone"
        return f"kept in fp32: {profile} is over budget without it ({self.worth()})"

    def entry(self) -> IslandEntry:
        """Return this as ``measurements.json`` stores it."""
        return IslandEntry(name=self.unit.name, op=self.unit.op, remedy=_REMEDIES[self.unit.kind], worth=self.ratio)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The islands found for ``profile``, and the ``entry`` for ``measurements.json``.

    ``sqnr_*`` is the SQNR in dB by output. ``complete`` is false if time ran out before a small set was found.
    ``error`` says why nothing was found, and there is no entry then; "" if something was.
    """

    profile: str
    islands: tuple[Island, ...] = ()
    entry: SearchEntry | None = None
    sqnr_before: Mapping[str, float] = field(default_factory=dict)
    sqnr_now: Mapping[str, float] = field(default_factory=dict)
    complete: bool = True
    error: str = ""

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
        if self.entry is None:
            return self.notes
        shares = f"{self.entry.bf16_bytes:.1%} of the weights' bytes"
        if self.entry.bf16_flops:
            shares += f" and {self.entry.bf16_flops:.1%} of the arithmetic"
        count = "1 island" if len(self.islands) == 1 else f"{len(self.islands)} islands"
        rows = [
            f"\n  {i.unit.kind} {i.unit.name} ({i.unit.op}){': ' if i.breach else ''}{i.worth()}"
            for i in self.islands[:_MAX_ROWS]
        ]
        if len(self.islands) > _MAX_ROWS:
            rows.append(f"\n  and {len(self.islands) - _MAX_ROWS} more, in the plan")
        found = f"profile {self.profile} was over budget; {count} in fp32 brought it within budget: bf16 now holds"
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
