"""Presents what became bf16 and what stayed fp32: the plan in groups, and the fp32 islands with their reasons."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from bf16kit.artifact.manifest import Manifest, Plan, PlanEntry
from bf16kit.drift.measurements import Measurements, SearchEntry

SEARCHED = "budget"  # the plan's code for what a search keeps in fp32
_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class Reason:
    """One wording of a reason, and how many entries have it."""

    reason: str
    count: int


@dataclass(frozen=True, slots=True)
class PlanGroup:
    """The entries of a plan that have one precision for one reason; ``of`` is "tensors" or "PROFILE nodes".

    ``reasons`` are the most frequent wordings, and ``more`` counts the others.
    """

    of: str
    precision: str
    code: str
    reasons: tuple[Reason, ...]
    more: int
    count: int

    @property
    def summary(self) -> str:
        """The reasons in one line."""
        if self.code == SEARCHED:
            return "kept in fp32 to meet the budget; the table of islands has the reasons"
        alone = len(self.reasons) == 1
        joined = "; ".join(each.reason if alone else f"{each.reason} ({each.count:,})" for each in self.reasons)
        return f"{joined}; and {self.more:,} more reasons" if self.more else joined


@dataclass(frozen=True, slots=True)
class Island:
    """A node of a bf16 profile that computes in fp32, or a weight kept in fp32 to meet the budget.

    A weight's ``profile`` is "tensors". ``worth`` is drift ÷ budget with it in bf16, if a search measured that;
    ``remedy`` is what the search did.
    """

    profile: str
    name: str
    op: str
    code: str
    reason: str
    remedy: str = ""
    worth: float | None = None


@dataclass(frozen=True, slots=True)
class SearchSummary:
    """The result of the search for fp32 islands in one profile, in numbers and in a sentence."""

    profile: str
    found: SearchEntry
    sentence: str


def searches(measured: Measurements) -> Iterator[SearchSummary]:
    """Yield the searches that were made."""
    for profile, entry in sorted(measured.profiles.items()):
        if entry.search is not None:
            yield SearchSummary(profile, entry.search, _describe_search(profile, entry.search))


def _describe_search(profile: str, found: SearchEntry) -> str:
    arithmetic = f" and {found.bf16_flops:.0%} of its arithmetic" if found.bf16_flops else ""
    return (
        f"A search of {found.candidates:,} candidates reduced the drift of {profile} from {_multiple(found.before)} to"
        f" {_multiple(found.after)} its budget: {found.bf16_bytes:.0%} of the bytes of its weights{arithmetic} are"
        " bf16."
    )


@dataclass(frozen=True, slots=True)
class IslandGroup:
    """The islands of one profile with one reason; ``searched``: a search kept them for the budget."""

    profile: str
    reason: str
    searched: bool
    islands: tuple[Island, ...]


def island_groups(islands: Iterable[Island]) -> list[IslandGroup]:
    """Group islands by reason, in their order."""
    found: dict[tuple[str, str], list[Island]] = {}
    for island in islands:
        searched = island.code == SEARCHED
        key = ("", "Kept in fp32 to meet the budget") if searched else (island.profile, island.reason)
        found.setdefault(key, []).append(island)
    return [IslandGroup(profile, reason, profile == "", tuple(rows)) for (profile, reason), rows in found.items()]


def _multiple(ratio: float) -> str:
    return f"{ratio:,.0f} ×" if 1000 <= ratio < math.inf else f"{ratio:.3g} ×"


def plan_groups(plan: Plan) -> Iterator[PlanGroup]:
    """Yield the plan by reason: the tensors first, then each profile's nodes; within each, the largest group first."""
    yield from _groups("tensors", plan.tensors)
    for profile, entries in sorted(plan.nodes.items()):
        yield from _groups(f"{profile} nodes", entries)


def _groups(of: str, entries: Iterable[PlanEntry]) -> list[PlanGroup]:
    found: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for entry in entries:
        found[entry.precision, entry.code][entry.reason] += 1
    groups = [
        PlanGroup(
            of=of,
            precision=precision,
            code=code,
            reasons=tuple(Reason(*each) for each in reasons.most_common(_EXAMPLES)),
            more=max(0, len(reasons) - _EXAMPLES),
            count=reasons.total(),
        )
        for (precision, code), reasons in found.items()
    ]
    return sorted(groups, key=lambda group: -group.count)


def islands(manifest: Manifest, measured: Measurements) -> Iterator[Island]:
    """Yield the fp32 islands, those that a search made first.

    In the cpu profile, which computes in fp32, and among the tensors, only what a search kept is an island. In
    cpu-bf16, only products that were kept are islands, because all other nodes compute in fp32 there.
    """
    found = [island for profile, entries in _candidates(manifest) for island in _islands(profile, entries, measured)]
    yield from sorted(found, key=lambda island: island.code != SEARCHED)


def _candidates(manifest: Manifest) -> Iterator[tuple[str, list[PlanEntry]]]:
    for profile, entries in sorted(manifest.plan.nodes.items()):
        bf16 = manifest.profiles[profile].precision == "bf16" if profile in manifest.profiles else False
        fp32 = [entry for entry in entries if entry.precision == "fp32" and entry.code != "profile"]
        yield profile, [entry for entry in fp32 if bf16 or entry.code == SEARCHED]
    yield "tensors", [entry for entry in manifest.plan.tensors if entry.code == SEARCHED]


def _islands(profile: str, entries: Iterable[PlanEntry], measured: Measurements) -> Iterator[Island]:
    searches = [entry.search for name, entry in measured.profiles.items() if profile in (name, "tensors")]
    worth = {island.name: island for search in searches if search is not None for island in search.islands}
    for entry in entries:
        if entry.code != "no_floats":
            found = worth.get(entry.name)
            yield Island(
                profile=profile,
                name=entry.name,
                op=entry.op,
                code=entry.code,
                reason=entry.reason,
                remedy="" if found is None else found.remedy,
                worth=None if found is None or math.isnan(found.worth) else found.worth,
            )
