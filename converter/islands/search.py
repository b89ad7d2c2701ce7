"""The search for fp32 islands of one profile: measure, rank, choose, and determine what each island is worth.

A conversion and ``bf16-convert explain`` both ask it what to keep in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from bf16kit.artifact.manifest import Plan
from bf16kit.drift.budget import Breach, Budget
from bf16kit.messages.wording import first_few
from converter.islands.candidates import Unit, bf16_alone, bf16_of, byte_shares, candidates, flop_shares, share
from converter.islands.choice import Group, Units, rank, smallest
from converter.islands.judged import Judge, Worth, breaches_of, ratio
from converter.islands.result import Island, SearchResult, decibels
from converter.islands.switches import Bf16
from converter.islands.trials import Deadline, OutOfTime, Signature, Trials, largest_error, typical
from converter.plan import make_plan
from converter.plan.decisions import Islands
from converter.plan.profiles import Profile
from converter.process.progress import Progress
from converter.rewrite import Prepared
from converter.verify.measure import Drifts, Expected

_RANKING = 0.5  # the largest share of the remaining time that ranking may take
# Of the budget. Values that are rounded the other way in the written graph change the drift by up to a tenth. A set
# that suffices on a few samples may miss the budget on all by some percent.
_SHARE, _SHARE_OF_ROUNDING = 0.97, 0.92
_NAMED = 3  # nodes and weights named in an error message
_COARSE = 16.0  # the tolerated error is the measured one divided by this if the budget gives no finite tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The goal of a search: islands for ``profile`` with which the outputs are within ``budget``.

    ``expected`` are the feeds to try, with the fp32 reference's outputs. ``islands`` exist already and stay; so do
    ``keep_fp32`` and ``bf16``, the user's patterns. Temporary files go to ``scratch``.
    """

    prepared: Prepared
    profile: Profile
    signature: Signature
    expected: Expected
    budget: Budget
    deadline: Deadline
    islands: Islands = field(default_factory=Islands)
    keep_fp32: Sequence[str] = ()
    bf16: Sequence[str] = ()
    scratch: Path | None = None

    def plan(self, units: Units = frozenset()) -> Plan:
        """Return the profile's plan with ``units`` as further islands."""
        alone = bf16_alone(units)
        nodes = {**self.islands.nodes, **dict.fromkeys(sorted(alone.nodes), "")}
        tensors = {**self.islands.tensors, **dict.fromkeys(sorted(alone.weights), "")}
        profiles = [self.profile.name] if self.profile.rounds else []
        islands = Islands(nodes, tensors)
        return make_plan(
            self.prepared, keep_fp32=self.keep_fp32, bf16=self.bf16, islands=islands, profiles=profiles
        ).plan


def search(task: Task, progress: Progress) -> SearchResult:
    """Return the smallest set of islands found for ``task``, or the reason why there is none.

    A profile that is within budget needs none.
    """
    searching = _Search(task, progress)
    try:
        return searching.run()
    finally:
        searching.trials.close()


class _Search:
    """One search in progress."""

    def __init__(self, task: Task, progress: Progress) -> None:
        self._task = task
        self._progress = progress
        plan, base = task.plan(), task.profile.base(task.prepared)
        self._bf16 = bf16_of(plan, task.profile)
        with self._step("preparing"):
            self.trials = Trials(base, self._bf16, task.signature, task.expected, task.deadline, task.scratch)
        self._flops = flop_shares(base, self.trials.shapes())
        self._bytes = byte_shares(base, {entry.name for entry in plan.tensors})
        self._units = candidates(base, plan, task.profile, self._flops, self._bytes)
        self._before: list[Drifts] = []

    def run(self) -> SearchResult:
        """Run the search and return its result."""
        budget = self._task.budget
        try:
            with self._step("measuring"):
                self._before = self.trials.drifts(self._bf16)
                breaches = breaches_of(budget, self._before)
                if not breaches:
                    return self._result(frozenset(), {}, self._before)
                everything = self._drifts(frozenset(self._units))
                if left := breaches_of(budget, everything):
                    return self._no_solution(left[0])
        except OutOfTime:
            return SearchResult(self._task.profile.name, complete=False, error=_NO_TIME)
        judge: Judge | None = None
        try:
            groups, ranked, tolerance = self._rank(breaches)
            with self._step("the smallest set within budget"):
                for judge in self._judges():
                    smallest(groups, judge.share * tolerance, judge.suffices)
                    if (result := self._confirmed(judge, complete=ranked)) is not None:
                        return result
        except OutOfTime:
            self.trials.deadline = Deadline()
            if judge is not None and (result := self._confirmed(judge, complete=False)) is not None:
                return result
        return self._result(frozenset(self._units), {}, everything, complete=False)

    def _step(self, phase: str) -> AbstractContextManager[object]:
        return self._progress.step(f"searching fp32 islands of {self._task.profile.name}: {phase}")

    def _rank(self, breaches: Sequence[Breach]) -> tuple[list[Group], bool, float]:
        """Rank the candidates on the sample where the outputs over budget are worst; also return the tolerated error
        there."""
        outputs = {breach.output for breach in breaches}
        errors = [largest_error(one, outputs) for one in self._before]
        worst = max(range(len(errors)), key=lambda i: (errors[i], -i))
        tolerance = self._tolerance(breaches, errors[worst])
        with self._step(f"where the error comes from, among {len(self._units)} candidates"):
            groups, ranked = rank(
                self._units,
                lambda alone: self.trials.error(bf16_alone(alone), worst, outputs),
                tolerance,
                self._task.deadline.part(_RANKING).expired,
            )
        return groups, ranked, tolerance

    def _judges(self) -> Iterator[Judge]:
        """Yield a judge that tries a few samples, and one that tries all, if these do not confirm the first's set."""
        budget, before = self._task.budget, self._before
        share = _SHARE_OF_ROUNDING if self._task.profile.rounds else _SHARE
        yield Judge(budget, share, typical(before), self._drifts)
        yield Judge(budget, 1.0, tuple(range(len(before))), self._drifts)

    def _confirmed(self, judge: Judge, *, complete: bool) -> SearchResult | None:
        """Return the judge's set as the result, if it is within the budget on all samples."""
        if judge.found is None:
            return None
        drifts = self._drifts(judge.found)
        if breaches_of(self._task.budget, drifts):
            return None
        return self._result(judge.found, judge.worth(), drifts, complete=complete)

    def _drifts(self, units: Units, samples: Sequence[int] | None = None) -> list[Drifts]:
        return self.trials.drifts(self._bf16_with(units), samples)

    def _bf16_with(self, units: Units) -> Bf16:
        """Return what is bf16 with ``units`` as islands, by the plan, so that it equals what will be written."""
        return bf16_of(self._task.plan(units), self._task.profile)

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

    def _result(self, found: Units, worth: Worth, drifts: Sequence[Drifts], *, complete: bool = True) -> SearchResult:
        budget, now = self._task.budget, self._bf16_with(found)
        return SearchResult(
            self._task.profile.name,
            tuple(_island(unit, worth.get(unit), budget) for unit in self._units if unit in found),
            candidates=len(self._units),
            flops_before=share(self._flops, self._bf16.nodes),
            flops_now=share(self._flops, now.nodes),
            bytes_before=share(self._bytes, self._bf16.weights),
            bytes_now=share(self._bytes, now.weights),
            drift_before=ratio(budget, self._before),
            drift_now=ratio(budget, drifts),
            sqnr_before=_sqnr(self._before),
            sqnr_now=_sqnr(drifts),
            complete=complete,
        )

    def _no_solution(self, left: Breach) -> SearchResult:
        """Say why not even all candidates in fp32 suffice: fp32 noise alone is too much, or what is still bf16."""
        name, noise = self._task.profile.name, breaches_of(self._task.budget, self.trials.drifts(Bf16()))
        if noise:
            return SearchResult(name, error=_NOISE.format(noise[0]))
        still = self._bf16_with(frozenset(self._units))
        names = first_few([*sorted(still.weights), *sorted(still.nodes)], _NAMED)
        return SearchResult(name, error=_STILL_BF16.format(left, names))


def _sqnr(drifts: Sequence[Drifts]) -> dict[str, float]:
    """Return the SQNR in dB of each output, over all rows."""
    rows = {output: [row.relative_l2**2 for one in drifts for row in one[output].rows] for output in drifts[0]}
    return {output: decibels(math.fsum(found) / len(found)) for output, found in rows.items() if found}


def _island(unit: Unit, worth: tuple[Breach, float] | None, budget: Budget) -> Island:
    if worth is None:
        return Island(unit)
    breach, now = worth
    return Island(unit, breach, now, budget.ratio(breach.metric, breach.measured))


_NO_TIME = (
    "the search for fp32 islands ran out of time before it found a set that is within budget; allow more with"
    " --search-minutes"
)
_NOISE = (
    "no fp32 islands can help: fp32 sums in another order change the outputs for these samples by more than the budget"
    " allows ({}); pass --samples with inputs like those that the model will see"
)
_STILL_BF16 = (
    "the search found no islands: drift is over budget even with all candidates in fp32: {}; still bf16, because of"
    " --bf16 or because they move bf16 data: {}"
)
