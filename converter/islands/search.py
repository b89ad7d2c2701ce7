"""The search for fp32 islands of one profile: measure, rank, choose, and determine what each island is worth."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bf16kit.artifact.manifest import Plan
from bf16kit.drift.budget import Breach, Budget
from bf16kit.messages.wording import first_few
from converter.islands.candidates import bf16_alone, bf16_of, candidates
from converter.islands.choice import MinimalSetFinder, Units
from converter.islands.costs import Costs
from converter.islands.judged import BudgetJudge, Worth, breaches_of, ratio
from converter.islands.phases import Phases
from converter.islands.ranking import Group, Unit, rank
from converter.islands.result import Island, SearchResult
from converter.islands.trials import Bf16, Deadline, Edges, ErrorScope, OutOfTime, Trials, typical
from converter.plan.decisions import Islands
from converter.plan.profiles import Profile
from converter.process.progress import Progress
from converter.rewrite import Prepared
from converter.verify.measure import Drifts, Expected

Replan = Callable[[Islands, Profile], Plan]  # returns the plan of one profile with these islands

_RANKING = 0.5  # the largest share of the remaining time that ranking may take
# Of the budget. Values that are rounded the other way in the written graph change the drift by up to a tenth. A set
# that suffices on a few samples may miss the budget on all by some percent.
_SHARE, _SHARE_OF_ROUNDING = 0.97, 0.92
_NAMED = 3  # nodes and weights named in an error message
_COARSE = 16.0  # the tolerated error is the measured one divided by this if the budget gives no finite tolerance


@dataclass(frozen=True, slots=True)
class Task:
    """The goal of a search: islands for ``profile`` with which the outputs are within ``budget``.

    ``expected`` are the feeds to try, with the fp32 reference's outputs. ``islands`` exist already and stay. With
    ``saturate``, weights that overflow become the largest finite number. ``ranking`` is that of an earlier search,
    which is used if the candidates are the same. Temporary files go to ``scratch``.
    """

    prepared: Prepared
    profile: Profile
    replan: Replan
    islands: Islands
    edges: Edges
    expected: Expected
    budget: Budget
    deadline: Deadline
    saturate: bool = False
    ranking: Sequence[Group] = ()
    scratch: Path | None = None


def search(task: Task, progress: Progress) -> SearchResult:
    """Return the smallest set of islands found for ``task``, or the reason why there is none."""
    with Phases(task.profile.name, progress) as phases:
        finder = _Search(task, phases)
        try:
            return finder.run()
        finally:
            finder.close()


class _Search:
    """One search in progress."""

    def __init__(self, task: Task, phases: Phases) -> None:
        self._task = task
        self._phases = phases
        self._base = task.profile.base(task.prepared)
        self._plan = task.replan(task.islands, task.profile)
        self._bf16 = bf16_of(self._plan, task.profile)
        phases.start("preparing")
        self._trials = Trials(
            self._base,
            self._bf16,
            task.edges,
            task.expected,
            task.deadline,
            saturate=task.saturate,
            scratch=task.scratch,
        )
        everything = frozenset(e.name for e in self._plan.tensors)
        self._costs = Costs.of(self._base, everything, self._trials.shapes())
        self._units = candidates(self._base, self._plan, task.profile, self._costs)
        self._groups: list[Group] = []
        self._before = math.nan
        self._tried: dict[tuple[Units, tuple[int, ...] | None], list[Drifts]] = {}

    def run(self) -> SearchResult:
        """Run the search and return its result."""
        everything = frozenset(self._units)
        try:
            before = self._trials.drifts(self._bf16)
            breaches = breaches_of(self._task.budget, before)
            if not breaches:
                return self._result(frozenset(), {}, before)
            self._before = ratio(self._task.budget, before)
            if breaches_of(self._task.budget, self._drifts(everything)):
                return self._no_solution()
        except OutOfTime:
            return SearchResult(self._task.profile.name, complete=False, error=_NO_TIME)
        return self._find_minimal(before, breaches)

    def close(self) -> None:
        self._trials.close()

    def _find_minimal(self, before: Sequence[Drifts], breaches: Sequence[Breach]) -> SearchResult:
        """Choose on a few samples; if all of them do not confirm the set, choose on all.

        If time runs out, return the smallest set that is known to suffice.
        """
        few, on_all = typical(before), tuple(range(len(before)))
        goals = (_SHARE_OF_ROUNDING if self._task.profile.rounds else _SHARE, few), (1.0, on_all)
        known: list[tuple[Units, Worth]] = [(frozenset(self._units), {})]
        complete = False
        try:
            scope = ErrorScope.worst(before, {breach.output for breach in breaches})
            tolerance = self._tolerance(breaches, scope.error(before))
            complete = self._rank(scope, tolerance)
            self._phases.start("the smallest set within budget")
            for share, samples in goals:
                judge = BudgetJudge(self._task.budget.tightened(share), samples, self._drifts)
                finder = MinimalSetFinder(judge.within_budget)
                try:
                    finder.find(self._groups, share * tolerance)
                finally:
                    if finder.found is not None:
                        known.append((finder.found, judge.worth(finder.found)))
                if finder.found is not None and self._suffices(finder.found):
                    break
        except OutOfTime:
            complete = False
            self._trials.set_deadline(Deadline(math.inf))
        found, worth = next(each for each in reversed(known) if self._suffices(each[0]))
        return self._result(found, worth, self._drifts(found), complete=complete)

    def _suffices(self, units: Units) -> bool:
        return not breaches_of(self._task.budget, self._drifts(units))

    def _rank(self, scope: ErrorScope, tolerance: float) -> bool:
        """Rank the candidates, or take over the task's ranking; return false if time ran out first."""
        self._groups, task = list(self._task.ranking), self._task
        if {unit for group in self._groups for unit in group.units} == set(self._units):
            return True
        self._phases.start(f"where the error comes from, among {len(self._units)} candidates")
        expired = task.deadline.part(_RANKING).expired
        self._groups, ranked = rank(self._units, partial(self._error, scope), tolerance, expired)
        return ranked

    def _drifts(self, units: Units, samples: tuple[int, ...] | None = None) -> list[Drifts]:
        key = units, samples
        if key not in self._tried:
            self._tried[key] = self._trials.drifts(self._bf16_with(units), samples)
        return self._tried[key]

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
        worth: Worth,
        drifts: Sequence[Drifts],
        *,
        complete: bool = True,
    ) -> SearchResult:
        task, costs = self._task, self._costs
        now = self._bf16_with(found)
        return SearchResult(
            task.profile.name,
            tuple(self._island(unit, worth.get(unit)) for unit in self._units if unit in found),
            candidates=len(self._units),
            flops_before=costs.flops_share(self._bf16.nodes),
            flops_now=costs.flops_share(now.nodes),
            bytes_before=costs.bytes_share(self._bf16.weights),
            bytes_now=costs.bytes_share(now.weights),
            drift_before=self._before,
            drift_now=ratio(task.budget, drifts),
            complete=complete,
            notes=() if complete else (_NOT_MINIMAL.format(task.profile.name),),
            ranking=tuple(self._groups),
        )

    def _no_solution(self) -> SearchResult:
        """Say why not even all candidates in fp32 suffice: fp32 noise alone is too much, or what is still bf16."""
        task = self._task
        noise = breaches_of(task.budget, self._trials.drifts(Bf16()))
        if noise:
            return SearchResult(task.profile.name, error=_NOISE.format(noise[0]))
        still_bf16 = self._bf16_with(frozenset(self._units))
        breach = breaches_of(task.budget, self._trials.drifts(still_bf16))[0]
        names = first_few([*sorted(still_bf16.weights), *sorted(still_bf16.nodes)], _NAMED)
        return SearchResult(
            task.profile.name,
            error=f"the search found no islands: drift is over budget even with all candidates in fp32: {breach}; still"
            f" bf16, because of --bf16 or because they move bf16 data: {names}",
        )

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


_NO_TIME = (
    "the search for fp32 islands ran out of time before it found a set that is within budget; allow more with"
    " --search-minutes"
)
_NOISE = (
    "no fp32 islands can help: fp32 sums in another order change the outputs for these samples by more than the budget"
    " allows ({}); pass --samples with inputs like those that the model will see"
)
_NOT_MINIMAL = (
    "profile {}: these islands bring it within budget, but some may be unnecessary, because the search ran out of"
    " time. Another run may find other islands; allow more time with --search-minutes"
)
