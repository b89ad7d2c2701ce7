"""The result of a search: the islands, what each is worth, and how much of the model is bf16 with them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from bf16kit.drift.budget import Breach
from bf16kit.drift.measurements import MOST_DB, IslandEntry, SearchEntry
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

    @property
    def name(self) -> str:
        return self.unit.name

    def worth(self) -> str:
        """Return what the island is worth, as ``relative_l2 2.1e-02 → 1.2e-02``; "" if it was not measured."""
        return f"{self.breach.metric} {self.breach.measured:.3g} → {self.with_it:.3g}" if self.breach else ""

    def reason(self, profile: str) -> str:
        """Return the reason it stays fp32, for the plan."""
        if self.breach is None:
            return f"kept in fp32: one of the islands with which {profile} is within budget; it was not tried alone"
        return f"kept in fp32: {profile} is over budget without it ({self.worth()})"


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The islands found for ``profile``; ``candidates`` counts what was searched.

    ``flops_*`` and ``bytes_*`` are the shares of arithmetic and of weights' bytes in bf16 before the search and now.
    ``drift_*`` are the largest drift ÷ budget, ``sqnr_*`` the SQNR in dB by output. ``complete`` is false if time ran
    out before a small set was found. ``error`` says why nothing was found; "" if something was.
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
        nodes = {island.name for island in self.islands if island.unit.kind == "node"}
        return [island.name for island in self.islands if not nodes & set(island.unit.readers)]

    def as_islands(self) -> Islands:
        """Return the islands as the plan takes them: nodes and tensors separately, each with its reason."""
        return Islands(self._reasons("node"), self._reasons("weight"))

    def entry(self) -> SearchEntry:
        """Return this as ``measurements.json`` stores it."""
        return SearchEntry(
            candidates=self.candidates,
            before=self.drift_before,
            after=self.drift_now,
            islands=[
                IslandEntry(name=i.name, op=i.unit.op, remedy=_REMEDIES[i.unit.kind], worth=i.ratio)
                for i in self.islands
            ],
            bf16_bytes=self.bytes_now,
            bf16_flops=self.flops_now,
        )

    def sentences(self) -> list[str]:
        """Return the sentences for the user: which islands, what they are worth, and how much is bf16 now."""
        rows = [
            f"\n  {i.unit.kind} {i.name} ({i.unit.op}){': ' if i.breach else ''}{i.worth()}"
            for i in self.islands[:_MAX_ROWS]
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
        return {island.name: island.reason(self.profile) for island in self.islands if island.unit.kind == kind}


def merged(results: Iterable[SearchResult]) -> Islands:
    """Merge the islands of all profiles; if several name the same island, the first gives the reason."""
    nodes: dict[str, str] = {}
    tensors: dict[str, str] = {}
    for result in results:
        found = result.as_islands()
        nodes = dict(found.nodes) | nodes
        tensors = dict(found.tensors) | tensors
    return Islands(nodes, tensors)


def decibels(ratio: float) -> float:
    """Convert noise ÷ signal to an SQNR in dB, within ±:data:`~bf16kit.drift.measurements.MOST_DB`."""
    if ratio == 0:
        return MOST_DB
    return max(-MOST_DB, min(MOST_DB, 0.0 - 10 * math.log10(ratio))) if math.isfinite(ratio) else -MOST_DB


_NOT_MINIMAL = (
    "profile {}: these islands bring it within budget, but some may be unnecessary, because the search ran out of"
    " time. Another run may find other islands; allow more time with --search-minutes"
)
