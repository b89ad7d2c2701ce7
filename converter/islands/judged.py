"""Judges sets of islands by the budget, as certification judges a profile; each set is tried once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from bf16kit.drift.budget import Breach, Budget
from bf16kit.drift.metrics import DriftSummary
from converter.islands.candidates import Unit
from converter.islands.choice import Units
from converter.verify import measure
from converter.verify.judging import choose_golden, find_breaches
from converter.verify.measure import Drifts

Worth = Mapping[Unit, tuple[Breach, float]]  # the breach without a unit, and that figure with it

_FIRST = 4  # every fourth sample is run first
_CLEARLY = 1.1  # the first samples exceed the budget clearly at this many times what they may have
_NEAR = 0.5  # drift ÷ budget; a set with less does not show how the samples differ near the budget


class Judge:
    """Judges sets of islands by ``share`` of ``budget`` on ``samples``; ``drifts`` tries a set on some samples.

    ``found`` is the last set that was within it. A set is tried on a few of the samples first, spread over them. If
    these exceed the budget clearly, compared with what they did when the last set was within it, the others are not
    run. Such a set may be within budget all the same; then the search finds more islands than necessary.
    """

    def __init__(
        self,
        budget: Budget,
        share: float,
        samples: Sequence[int],
        drifts: Callable[[Units, Sequence[int]], list[Drifts]],
    ) -> None:
        self.share = share
        self.found: Units | None = None
        self._budget = budget.tightened(share)
        self._first = tuple(samples[::_FIRST])
        self._rest = tuple(index for index in samples if index not in self._first)
        self._drifts = drifts
        self._veto = math.inf  # drift ÷ budget on the first samples
        self._breaches: dict[Units, list[Breach]] = {}
        self._now: Mapping[str, DriftSummary] = {}

    def suffices(self, units: Units) -> bool:
        """Whether a profile with the islands ``units`` is within the budget; each set is tried once."""
        if units not in self._breaches:
            self._breaches[units] = self._try(units)
        return not self._breaches[units]

    def worth(self) -> Worth:
        """Return what each unit of the set found is worth, of those without which it was tried."""
        worth: dict[Unit, tuple[Breach, float]] = {}
        for unit in self.found or ():
            for breach in self._breaches.get((self.found or frozenset()) - {unit}, [])[:1]:
                judged = self._now[breach.output].judged(breach.metric)
                worth[unit] = breach, math.nan if judged is None else judged
        return worth

    def _try(self, units: Units) -> list[Breach]:
        drifts = self._drifts(units, self._first)
        on_first = ratio(self._budget, drifts)
        if on_first <= self._veto:
            drifts = [*drifts, *self._drifts(units, self._rest)]
        breaches = breaches_of(self._budget, drifts)
        if not breaches:
            self.found, self._now = units, measure.summarise(drifts)
            if (on_all := ratio(self._budget, drifts)) > _NEAR:
                self._veto = max(1.0, _CLEARLY * on_first / on_all)
        return breaches


def breaches_of(budget: Budget, drifts: Sequence[Drifts]) -> list[Breach]:
    """Return where ``drifts``, one entry per sample, exceed ``budget``.

    If all samples together do not, but each one alone does, this returns the breaches of the first: a server judges
    each start by one sample.
    """
    given = {number: one for number, one in enumerate(drifts) if not measure.is_made(one)}
    return find_breaches(budget, drifts) or find_breaches(budget, [drifts[choose_golden(budget, [given])]])


def ratio(budget: Budget, drifts: Sequence[Drifts]) -> float:
    """Return the largest drift ÷ budget."""
    summaries = measure.summarise(drifts).values()
    judged = [(name, summary.judged(name)) for summary in summaries for name in budget.as_dict()]
    return max((budget.ratio(name, measured) for name, measured in judged if measured is not None), default=0.0)
