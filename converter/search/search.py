"""The search for fp32 islands of one profile: measure, rank, choose, and determine what each island is worth."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from bf16kit.budget import Breach, Budget
from bf16kit.manifest import Plan
from bf16kit.wording import first_few
from converter.model import Feeds
from converter.passes import Prepared
from converter.plan.decisions import Islands
from converter.plan.profiles import Profile
from converter.process.progress import Progress
from converter.proof.judging import find_breaches
from converter.proof.measure import Drifts
from converter.search.cache import SearchCache
from converter.search.candidates import bf16_alone, bf16_of, candidates
from converter.search.choice import MinimalSetFinder, Units, cost
from converter.search.costs import Costs
from converter.search.judged import BudgetJudge, ratio
from converter.search.phases import Phases
from converter.search.ranking import Group, Unit, rank
from converter.search.result import Island, SearchResult
from converter.search.trials import Bf16, Deadline, Edges, ErrorScope, OutOfTime, Trials, typical

Replan = Callable[[Islands, Profile], Plan]  # returns the plan of one profile with these islands

_RANKING = 0.5  # the largest share of the remaining time that ranking may take
_SHARES = (0.97, 0.9, 0.8)  # of the budget, tried in turn: a set that suffices on few samples may not suffice on all
_NAMED = 3  # nodes and weights named in an error message
_COARSE = 16.0  # the tolerated error is the measured one divided by this if the budget gives no finite tolerance


@dataclass(frozen=True, slots=True)
class Task:
    """The goal of a search: islands for ``profile`` with which the outputs for ``feeds`` are within ``budget``.

    ``islands`` exist already and stay. With ``saturate``, weights that overflow become the largest finite number.
    ``cache`` holds results of earlier searches with another budget, and is extended. Temporary files go to
    ``scratch``.
    """

    prepared: Prepared
    profile: Profile
    replan: Replan
    islands: Islands
    edges: Edges
    feeds: Sequence[Feeds]
    budget: Budget
    deadline: Deadline
    saturate: bool = False
    cache: SearchCache = field(default_factory=SearchCache)
    scratch: Path | None = None


def search(task: Task, progress: Progress) -> SearchResult:
    """Return the smallest set of islands found for ``task``, or the reason why there is none."""
    with Phases(task.profile.name, progress) as phases:
        try:
            finder = _Search(task, phases)
        except OutOfTime:
            return SearchResult(task.profile.name, complete=False, error=_NO_TIME)
        try:
            return finder.run()
        except OutOfTime:
            return finder.best_known()
        finally:
            finder.close()


_NO_TIME = (
    "the search for fp32 islands ran out of time before it found a set that is within budget; allow more with"
    " --search-minutes"
)


class _Search:
    """One search in progress."""

    def __init__(self, task: Task, phases: Phases) -> None:
        self._task = task
        self._phases = phases
        self._base = task.profile.base(task.prepared)
        self._plan = task.replan(task.islands, task.profile)
        self._bf16 = bf16_of(self._plan, task.profile)
        phases.start("preparing")
        # A search that continues an earlier one opens its session even if time has run out: it has known sets to check.
        deadline = Deadline(math.inf) if task.cache.tried else task.deadline
        self._trials = Trials(
            self._base, self._bf16, task.edges, task.feeds, deadline, saturate=task.saturate, scratch=task.scratch
        )
        everything = frozenset(e.name for e in self._plan.tensors)
        self._costs = Costs.of(self._base, everything, self._trials.shapes())
        self._trials.set_deadline(task.deadline)
        self._finders: list[MinimalSetFinder] = []
        self._groups: list[Group] = task.cache.groups
        self._ranked = task.cache.ranked
        self._before = 0.0

    def run(self) -> SearchResult:
        """Run the search and return its result. Raises :class:`OutOfTime`."""
        units = candidates(self._base, self._plan, self._task.profile, self._costs)
        cache = self._task.cache
        before = cache.before = cache.before or self._trials.drifts(self._bf16)
        breaches = find_breaches(self._task.budget, before)
        if not breaches or not units:
            return self._result(frozenset(), {})
        self._before = ratio(self._task.budget, before)
        scope = ErrorScope.worst(before, {breach.output for breach in breaches})
        tolerance = self._tolerance(breaches, scope.error(before))
        if not cache.groups:
            self._phases.start(f"where the error comes from, among {len(units)} candidates")
            ranking = self._task.deadline.part(_RANKING)
            cache.groups, cache.ranked = rank(units, partial(self._error, scope), tolerance, ranking.expired)
            self._groups, self._ranked = cache.groups, cache.ranked
        self._phases.start("the smallest set within budget")
        return self._find_minimal(typical(before), tolerance)

    def _find_minimal(self, samples: Sequence[int], tolerance: float) -> SearchResult:
        """Choose on a few ``samples``; if all of them do not confirm the set, choose again with less of the budget."""
        for share in _SHARES if len(samples) < len(self._task.feeds) else (1.0,):
            judge = BudgetJudge(self._task.budget.tightened(share), lambda units: self._drifts(units, samples))
            self._finders.append(MinimalSetFinder(judge.within_budget))
            known = self._known_sets(self._task.budget.tightened(share), samples)
            found = self._finders[-1].find(self._groups, share * tolerance, known[0] if known else None)
            if found is None:
                return self._no_solution()
            worth = {unit: judge.worth(found, unit) for unit in found}
            drifts = self._drifts(found)
            if not find_breaches(self._task.budget, drifts):
                return self._result(found, worth, drifts, self._blame(found))
        return self.best_known()

    def best_known(self) -> SearchResult:
        """Return the best known set that all samples confirm, after a few more runs; an error if there is none."""
        self._ranked = False
        self._trials.set_deadline(Deadline(math.inf))
        known = sorted({units for finder in self._finders for units in finder.sets_within_budget}, key=_by_cost)
        known = known or self._known_sets(self._task.budget)
        steps = {2**step - 1 for step in range(len(known).bit_length())} | {len(known) - 1}
        for units in (known[step] for step in sorted(steps) if known):
            drifts = self._drifts(units)
            if not find_breaches(self._task.budget, drifts):
                return self._result(units, self._known_worth(units), drifts)
        return SearchResult(self._task.profile.name, complete=False, error=_NO_TIME)

    def close(self) -> None:
        self._trials.close()

    def _known_sets(self, budget: Budget, samples: Sequence[int] | None = None) -> list[Units]:
        """Return the sets known to meet ``budget``, on exactly ``samples`` or (None) on any, the cheapest first."""
        found = {
            units
            for (units, on), drifts in self._task.cache.tried.items()
            if samples in (None, on) and not find_breaches(budget, drifts)
        }
        return sorted(found, key=_by_cost)

    def _known_worth(self, units: Units) -> dict[Unit, tuple[Breach, float]]:
        """Return the worth of those ``units`` that were tried without before time ran out."""
        worth: dict[Unit, tuple[Breach, float]] = {}
        tried = self._task.cache.tried
        for without, samples in tried:
            if len(units - without) == 1 and without < units and (units, samples) in tried:
                judge = BudgetJudge(self._task.budget, partial(self._drifts, samples=samples))
                (unit,) = units - without
                if unit not in worth and not judge.within_budget(without):
                    worth[unit] = judge.worth(units, unit)
        return worth

    def _drifts(self, units: Units, samples: Sequence[int] | None = None) -> list[Drifts]:
        tried = self._task.cache.tried
        key = units, tuple(range(len(self._task.feeds)) if samples is None else samples)
        if key not in tried:
            tried[key] = self._trials.drifts(self._bf16_with(units), samples)
        return tried[key]

    def _error(self, scope: ErrorScope, alone: Sequence[Unit]) -> float:
        return self._trials.error(bf16_alone(alone), scope)

    def _bf16_with(self, units: Units) -> Bf16:
        """Return what is bf16 with ``units`` as islands, by the plan, so that it equals what will be written."""
        alone = bf16_alone(units)
        islands = Islands(
            {**self._task.islands.nodes, **dict.fromkeys(sorted(alone.nodes), "")},
            {**self._task.islands.tensors, **dict.fromkeys(sorted(alone.weights), "")},
        )
        return bf16_of(self._task.replan(islands, self._task.profile), self._task.profile)

    def _tolerance(self, breaches: Sequence[Breach], error: float) -> float:
        """Return the relative L2 error that would just be within budget, given an ``error`` that is not."""
        budget = self._task.budget
        ratios = [budget.ratio(breach.metric, breach.measured) for breach in breaches]
        # cosine distances are squares of errors
        linear = [math.sqrt(r) if b.metric.startswith("cosine") else r for r, b in zip(ratios, breaches, strict=True)]
        finite = [ratio for ratio in linear if math.isfinite(ratio)]
        if not math.isfinite(error):
            return budget.bound("relative_l2") or 1 / _COARSE**2
        return error / max(finite, default=_COARSE)

    def _result(
        self,
        found: Units,
        worth: Mapping[Unit, tuple[Breach, float]],
        drifts: Sequence[Drifts] = (),
        blame: str = "",
    ) -> SearchResult:
        task, costs = self._task, self._costs
        now = self._bf16_with(found)
        order = [unit for group in self._groups for unit in group.units if unit in found]
        notes = () if self._ranked else (_NOT_MINIMAL.format(task.profile.name),)
        return SearchResult(
            task.profile.name,
            tuple(self._island(unit, worth.get(unit)) for unit in order),
            candidates=len(self._units()),
            flops_before=costs.flops_share(self._bf16.nodes),
            flops_now=costs.flops_share(now.nodes),
            bytes_before=costs.bytes_share(self._bf16.weights),
            bytes_now=costs.bytes_share(now.weights),
            drift_before=self._before,
            drift_now=ratio(task.budget, drifts) if drifts else math.nan,
            blame=blame,
            complete=self._ranked,
            notes=notes,
        )

    def _blame(self, found: Units) -> str:
        """Return a sentence on the weight to blame if fp32 activations alone do not meet the budget, else ""."""
        weights = [unit for unit in found if unit.kind == "weight"]
        if not weights or not self._task.profile.rounds:
            return ""
        breaches = find_breaches(self._task.budget, self._trials.drifts(Bf16(frozenset(), self._bf16.weights)))
        return self._describe_blame(breaches[0]) if breaches else ""

    def _describe_blame(self, breach: Breach) -> str:
        guilty = [group for group in self._groups if any(unit.kind == "weight" for unit in group.units)]
        worst = max(guilty, key=lambda group: group.error)
        names = ", ".join(unit.name for unit in worst.units if unit.kind == "weight")
        return (
            f"profile {self._task.profile.name}: fp32 activations alone would be over budget ({breach}); the largest"
            f" cause is the weight {names}, whose rounding alone gives a relative_l2 of {worst.error:.3g}"
        )

    def _no_solution(self) -> SearchResult:
        task = self._task
        still_bf16 = self._bf16_with(frozenset(self._units()))
        breach = find_breaches(task.budget, self._trials.drifts(still_bf16))[0]
        reason = f"drift is over budget even with all candidates in fp32: {breach}"
        names = [*sorted(still_bf16.weights), *sorted(still_bf16.nodes)]
        if names:
            reason += f"; still bf16, because of --bf16 or because they move bf16 data: {first_few(names, _NAMED)}"
        return SearchResult(task.profile.name, error=f"the search found no islands: {reason}")

    def _island(self, unit: Unit, worth: tuple[Breach, float] | None) -> Island:
        names = frozenset({unit.name})
        breach, now = worth or (None, None)
        return Island(
            kind=unit.kind,
            name=unit.name,
            op=unit.op,
            output=breach.output if breach else "",
            bound=breach.metric if breach else "",
            without=breach.measured if breach else None,
            with_it=now,
            ratio=self._task.budget.ratio(breach.metric, breach.measured) if breach else None,
            flops=self._costs.flops_share(names) if unit.kind == "node" else 0.0,
            bytes=self._costs.bytes_share(names) if unit.kind == "weight" else 0.0,
        )

    def _units(self) -> list[Unit]:
        return [unit for group in self._groups for unit in group.units]


def _by_cost(units: Units) -> tuple[float, list[str]]:
    return cost(units), sorted(f"{unit.kind} {unit.name}" for unit in units)


_NOT_MINIMAL = (
    "profile {}: these islands bring it within budget, but some may be unnecessary, because the search ran out of"
    " time. Islands without a worth were not tested for removal, and another run may find other islands; allow more"
    " time with --search-minutes"
)
