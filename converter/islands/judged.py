"""Judges sets of islands by the budget, as certification judges a profile; each set is tried once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from bf16kit.drift.budget import Breach, Budget
from converter.islands.choice import Units
from converter.islands.ranking import Unit
from converter.verify import golden, measure
from converter.verify.judging import find_breaches
from converter.verify.measure import Drifts

Worth = Mapping[Unit, tuple[Breach, float]]  # the breach without a unit, and that figure with it

_FIRST = 4  # every fourth sample is run first
_TOLERANCE = 1.1
_NEAR = 0.5  # drift ÷ budget; a set with less does not show how the samples differ near the budget


def breaches_of(budget: Budget, drifts: Sequence[Drifts]) -> list[Breach]:
    """Return where ``drifts``, one entry per sample, exceed ``budget``.

    If all samples together do not, but each one alone does, this returns the breaches of the first: a server judges
    each start by one sample.
    """
    given = {number: one for number, one in enumerate(drifts) if not measure.is_made(one)}
    return find_breaches(budget, drifts) or find_breaches(budget, [drifts[golden.choose(budget, [given])]])


class BudgetJudge:
    """Judges sets of islands by ``budget`` on ``samples``. ``drifts`` tries a set on some samples.

    A set is tried on a few of the samples first, spread over them. If these exceed the budget clearly, compared with
    what they did when the last set was within it, the others are not run. Such a set may be within budget all the same;
    then the search finds more islands than necessary.
    """

    def __init__(
        self,
        budget: Budget,
        samples: Sequence[int],
        drifts: Callable[[Units, tuple[int, ...]], list[Drifts]],
    ) -> None:
        self._budget = budget
        self._first = tuple(samples[::_FIRST])
        self._rest = tuple(index for index in samples if index not in self._first)
        self._drifts = drifts
        self._veto = math.inf  # drift ÷ budget on the first samples
        self._known: dict[Units, tuple[list[Breach], list[Drifts]]] = {}

    def within_budget(self, units: Units) -> bool:
        """Whether a profile with the islands ``units`` is within the budget."""
        return not self.breaches(units)

    def breaches(self, units: Units) -> list[Breach]:
        """Return where a profile with the islands ``units`` exceeds the budget."""
        return self._evaluate(units)[0]

    def worth(self, found: Units) -> Worth:
        """Return what each unit of ``found`` is worth, of those without which ``found`` was tried."""
        now = measure.summarise(self._evaluate(found)[1])
        worth: dict[Unit, tuple[Breach, float]] = {}
        for unit in found:
            breaches = self._known.get(found - {unit}, ([], []))[0]
            if breaches:
                judged = now[breaches[0].output].judged(breaches[0].metric)
                worth[unit] = breaches[0], math.nan if judged is None else judged
        return worth

    def _evaluate(self, units: Units) -> tuple[list[Breach], list[Drifts]]:
        if units not in self._known:
            drifts = self._drifts(units, self._first)
            on_first = ratio(self._budget, drifts)
            if on_first <= self._veto:
                drifts = [*drifts, *self._drifts(units, self._rest)]
            breaches = breaches_of(self._budget, drifts)
            if not breaches and (on_all := ratio(self._budget, drifts)) > _NEAR:
                self._veto = max(1.0, _TOLERANCE * on_first / on_all)
            self._known[units] = breaches, drifts
        return self._known[units]


def ratio(budget: Budget, drifts: Sequence[Drifts]) -> float:
    """Return the largest drift ÷ budget."""
    return max(
        (
            budget.ratio(name, judged)
            for summary in measure.summarise(drifts).values()
            for name in budget.as_dict()
            if (judged := summary.judged(name)) is not None
        ),
        default=0.0,
    )
