"""The search for fp32 islands: measure, rank, choose, and determine what each island is worth.

A conversion and ``bf16-convert explain`` both ask it what to keep in fp32.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from pathlib import Path

from bf16kit.converter.islands.candidates import (
    Group,
    Island,
    SearchResult,
    Units,
    bf16_alone,
    bf16_of,
    candidates,
    larger,
    merged,
    rank,
    smallest,
)
from bf16kit.converter.islands.layertrace import decibels
from bf16kit.converter.islands.switches import Bf16, byte_shares, flop_shares
from bf16kit.converter.islands.trials import (
    Deadline,
    Judge,
    OutOfTime,
    Task,
    Trials,
    breaches_of,
    largest_error,
    ratio,
    typical,
)
from bf16kit.converter.options import Options
from bf16kit.converter.plan.decisions import Islands
from bf16kit.converter.plan.profiles import PROFILES
from bf16kit.converter.process.memory import release_memory
from bf16kit.converter.process.progress import Progress
from bf16kit.converter.rewrite import Prepared
from bf16kit.converter.verify.certify import Certified
from bf16kit.converter.verify.measure import Drifts
from bf16kit.drift.budget import Breach
from bf16kit.messages.wording import first_few

# Of the budget. Values that are rounded the other way in the written graph change the drift by up to a tenth. A set
# that suffices on a few samples may miss the budget on all by some percent.
_SHARE, _SHARE_OF_ROUNDING = 0.97, 0.92
_RANKING = 0.5  # the largest share of the remaining time that ranking may take
_NAMED = 3  # nodes and weights named in an error message
_AGAIN = 0.75  # of the budget, for a second search if the written graph is over budget with what the first one found
_COARSE = 16.0  # the tolerated error is the measured one divided by this if the budget gives no finite tolerance


class IslandSearches:
    """The searches of one conversion for its profiles over budget; temporary files go to ``scratch``.

    A search runs its own graph, which sums in another order than the written one, so a few values are rounded the
    other way, and the largest of two nearly equal logits may be the other one. If the written graph is over budget
    with a search's result, it is written again: with what a second search finds for less than the budget, and then with
    ever larger sets. ``results`` has what was written last, by profile name.
    """

    def __init__(self, prepared: Prepared, options: Options, progress: Progress, scratch: Path) -> None:
        self._prepared, self._options = prepared, options
        self._progress, self._scratch = progress, scratch
        self._deadline: Deadline | None = None  # starts with the first search
        self._certified: Certified  # what was written last
        self._found: dict[str, Iterator[SearchResult]] = {}  # by profile name, in the order to write them
        self._written = Islands()
        self.results: dict[str, SearchResult] = {}

    def next_islands(self, certified: Certified) -> Islands | None:
        """Return the islands to write and certify next; None if nothing is over budget or nothing more can be done.

        Profiles are searched in the order of ``PROFILES``: those that only round weights come first. Torch modules are
        not: torch.autocast decides their islands. cpu-bf16 is not searched either, but profits from what is kept in
        fp32 for the others. If no set suffices for a profile, the reason is added to ``certified.breaches``, and what
        was kept for it becomes bf16 again.
        """
        if not self._options.search or self._options.allow_over_budget:
            return None
        self._certified = certified
        for name, profile in PROFILES.items():
            if name in self.results:
                after = ratio(self._options.budget, certified.runs[name].drifts)
                now = bf16_of(certified.manifest.plan, profile)
                self.results[name] = replace(self.results[name], after=after, bf16=now)
            if profile.searched and certified.breaches.get(name):
                self._next_of(name)
        release_memory()
        islands = merged(self.results.values())
        if islands == self._written:
            return None
        self._written = islands
        return islands

    def sentences(self) -> list[str]:
        """Return the sentences for the user on the islands."""
        return [sentence for _, result in sorted(self.results.items()) for sentence in result.sentences()]

    def remarks(self) -> list[str]:
        """Return the notes of the searches, which the measurements do not hold."""
        return [note for _, result in sorted(self.results.items()) for note in result.notes]

    def _next_of(self, name: str) -> None:
        """Take the next result for ``name``, a profile over budget."""
        found = self._found.setdefault(name, self._search(name))
        result = next(found)
        if not result.islands and not result.error:  # it was within budget, with what is kept for other profiles
            if merged(self.results.values()) != self._written:
                return
            result = next(found)
        if result.error:
            self._certified.breaches[name].append(result.error)
            self.results.pop(name, None)
        else:
            self.results[name] = result

    def _search(self, name: str) -> Iterator[SearchResult]:
        """Yield what to write for ``name`` as long as the written graph is over budget, and at last an error."""
        found = search(self._task(name, written=self._certified.runs[name].drifts), self._progress)
        yield found
        if not found.error:
            again = search(self._task(name, share=_AGAIN), self._progress)
            if again.islands and merged([again]) != merged([found]):
                yield replace(again, before=found.before)
            yield from found.larger
        yield from itertools.repeat(found if found.error else SearchResult(name, error=_NOT_CONFIRMED))

    def _task(self, name: str, *, share: float = 1.0, written: Sequence[Drifts] = ()) -> Task:
        self._deadline = self._deadline or Deadline.after(self._options.search_minutes)
        return Task(
            prepared=self._prepared,
            profile=PROFILES[name],
            manifest=self._certified.manifest,
            expected=self._certified.expected,
            budget=self._options.budget,
            share=share,
            deadline=self._deadline,
            islands=merged(result for profile, result in self.results.items() if profile != name),
            scratch=self._scratch,
            written=written,
        )


def search(task: Task, progress: Progress) -> SearchResult:
    """Return the smallest set of islands found for ``task``, or the reason why there is none.

    A profile that is within budget needs none.
    """
    searching = _Search(task, progress)
    with closing(searching.trials.runtime):
        return searching.run()


class _Search:
    """One search in progress."""

    def __init__(self, task: Task, progress: Progress) -> None:
        self._task, self._progress = task, progress
        plan, base = task.plan(), task.profile.base(task.prepared)
        with self._step("preparing"):
            self.trials = Trials(task)
        self._flops = flop_shares(base, self.trials.shapes())
        self._bytes = byte_shares(base, {entry.name for entry in plan.tensors})
        self._units = candidates(base, plan, task.profile, self._flops, self._bytes)
        self._budget = task.budget.tightened(task.share)
        self._before: list[Drifts] = []

    def run(self) -> SearchResult:
        """Run the search and return its result."""
        budget, everything = self._budget, frozenset(self._units)
        try:
            with self._step("measuring"):
                self._before = [*self._task.written] or self._drifts(frozenset())
                breaches = breaches_of(budget, self._before)
                if not breaches and not self._task.written:
                    return self._result(frozenset(), self._before)
                with_everything = self._drifts(everything)
                if left := breaches_of(budget, with_everything):
                    return self._no_solution(left[0])
                if not everything:  # all is kept for other profiles, unlike when it was written
                    return self._result(everything, with_everything)
        except OutOfTime:
            return SearchResult(self._task.profile.name, complete=False, error=_NO_TIME)
        part = _SHARE_OF_ROUNDING if self._task.profile.rounds else _SHARE
        # On a few samples; then on all, if these do not confirm what was found on the few.
        parts = ((part, typical(self._before)), (1.0, range(len(self._before))))
        judges = [Judge(self._task.budget, at_most * self._task.share, some, self._drifts) for at_most, some in parts]
        groups, complete = list[Group](), False
        try:
            groups, ranked = self._rank(breaches)
            with self._step("the smallest set within budget"):
                for judge in judges:
                    smallest(groups, judge.suffices)
                    if judge.found is not None and not breaches_of(budget, self._drifts(judge.found)):
                        break
            complete = ranked
        except OutOfTime:
            pass
        self.trials.deadline = Deadline()  # a few runs are left
        judge = next((each for each in reversed(judges) if each.found is not None), judges[0])
        with self._step("confirming on all samples"):
            sets = larger(self._units, groups, judge.found or frozenset())
            return self._confirmed(sets, judge, complete=complete)

    def _step(self, phase: str) -> AbstractContextManager[object]:
        return self._progress.step(f"searching fp32 islands of {self._task.profile.name}: {phase}")

    def _rank(self, breaches: Sequence[Breach]) -> tuple[list[Group], bool]:
        """Rank the candidates on the sample where the outputs over budget, or else all outputs, are worst."""
        outputs = {breach.output for breach in breaches} or {*self._before[0]}
        errors = [largest_error(one, outputs) for one in self._before]
        worst = max(range(len(errors)), key=lambda i: (errors[i], -i))
        with self._step(f"where the error comes from, among {len(self._units)} candidates"):
            return rank(
                self._units,
                lambda alone: self.trials.error(bf16_alone(alone), worst, outputs),
                self._tolerance(breaches, errors[worst]),
                self._task.deadline.part(_RANKING).expired,
            )

    def _confirmed(self, sets: Sequence[Units], judge: Judge, *, complete: bool) -> SearchResult:
        """Return the first of ``sets`` that is within the budget on all samples; the last one is known to be."""
        place, drifts = 0, self._drifts(sets[0])
        while breaches_of(self._budget, drifts) and place < len(sets) - 1:
            place += 1
            drifts = self._drifts(sets[place])
        first, *others = (self._result(units, drifts, judge, complete=complete) for units in sets[place:])
        return replace(first, larger=tuple(others))

    def _drifts(self, units: Units, samples: Sequence[int] | None = None) -> list[Drifts]:
        return self.trials.drifts(self._task.rounded(units), samples)

    def _tolerance(self, breaches: Sequence[Breach], error: float) -> float:
        """Return the relative L2 error that would just be within budget, given the present ``error``."""
        budget = self._budget
        if not math.isfinite(error):
            return budget.bound("relative_l2") or 1 / _COARSE**2
        ratios = ((breach.metric, budget.ratio(breach.metric, breach.measured)) for breach in breaches)
        # cosine distances are squares of errors
        linear = [math.sqrt(ratio) if metric.startswith("cosine") else ratio for metric, ratio in ratios]
        return error / max(filter(math.isfinite, linear), default=_COARSE if breaches else 1.0)

    def _result(
        self, found: Units, drifts: Sequence[Drifts], judge: Judge | None = None, *, complete: bool = True
    ) -> SearchResult:
        worth = {} if judge is None or judge.found != found else judge.worth()
        return SearchResult(
            self._task.profile.name,
            tuple(worth.get(unit, Island(unit)) for unit in self._units if unit in found),
            candidates=len(self._units),
            before=ratio(self._task.budget, self._before),
            after=ratio(self._task.budget, drifts),
            flops=self._flops,
            stored=self._bytes,
            bf16=self._task.rounded(found),
            sqnr_before=_sqnr(self._before),
            sqnr_now=_sqnr(drifts),
            complete=complete,
        )

    def _no_solution(self, left: Breach) -> SearchResult:
        """Say why not even all candidates in fp32 suffice: fp32 noise alone is too much, or what is still bf16."""
        name, noise = self._task.profile.name, breaches_of(self._budget, self.trials.drifts(Bf16()))
        if noise:
            return SearchResult(name, error=_NOISE.format(noise[0]))
        still = self._task.rounded(frozenset(self._units))
        names = first_few([*sorted(still.weights), *sorted(still.nodes)], _NAMED)
        return SearchResult(name, error=_STILL_BF16.format(left, names))


def _sqnr(drifts: Sequence[Drifts]) -> dict[str, float]:
    """Return the SQNR in dB of each output, over all rows."""
    rows = {output: [row.relative_l2**2 for one in drifts for row in one[output].rows] for output in drifts[0]}
    return {output: decibels(math.fsum(found) / len(found)) for output, found in rows.items() if found}


_NOT_CONFIRMED = (
    "the search for fp32 islands found sets that suffice, but running the written graph did not confirm any"
)
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
