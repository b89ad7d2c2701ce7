"""Judges sets of islands by the budget; each set is tried once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from bf16kit.budget import Breach, Budget
from bf16kit.drift import DriftSummary
from converter.proof import measure
from converter.proof.judging import find_breaches
from converter.proof.measure import Drifts
from converter.search.choice import Units
from converter.search.ranking import Unit


class BudgetJudge:
    """Judges sets of islands by ``budget``. ``drifts`` tries one set; results are kept, so each set is tried once."""

    def __init__(self, budget: Budget, drifts: Callable[[Units], list[Drifts]]) -> None:
        self._budget = budget
        self._drifts = drifts
        self._known: dict[Units, tuple[list[Breach], dict[str, DriftSummary]]] = {}

    def within_budget(self, units: Units) -> bool:
        """Whether a profile with the islands ``units`` is within the budget."""
        return not self.breaches(units)

    def breaches(self, units: Units) -> list[Breach]:
        """Return where a profile with the islands ``units`` exceeds the budget."""
        return self._evaluate(units)[0]

    def worth(self, found: Units, unit: Unit) -> tuple[Breach, float]:
        """Return the first breach if ``unit`` of ``found`` were bf16 after all, and the same figure with all of it."""
        breach = self.breaches(found - {unit})[0]
        judged = self._evaluate(found)[1][breach.output].judged(breach.metric)
        return breach, math.nan if judged is None else judged

    def _evaluate(self, units: Units) -> tuple[list[Breach], dict[str, DriftSummary]]:
        if units not in self._known:
            drifts = self._drifts(units)
            self._known[units] = find_breaches(self._budget, drifts), measure.summarise(drifts)
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
