"""The verdict on a model's recent drift, which the fallback, the status page and the log act on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

State = Literal["unknown", "within", "over"]
Cause = Literal["none", "rounding", "broken", "out_of_range"]


@dataclass(frozen=True, slots=True)
class DriftVerdict:
    """Recent drift against the budget, and whether it has changed. By default, nothing was measured.

    * ``state``: ``over`` once it is established beyond chance, although it is looked at after every sample, until 1 is
      in the 95 % interval again; ``within`` if every bound is met (:attr:`service.drift.estimates.Estimate.within`);
      ``unknown`` otherwise.
    * ``cause``: the diagnosis (:mod:`service.drift.diagnosis`).
    * ``output``, ``metric``: the bound that is most over or nearest to a breach; "" if nothing is bounded or measured.
    * ``ratio``: drift ÷ budget of that bound; ``low`` and ``high``: its interval. Any of the three may be infinite.
    * ``effective_samples``: effective sample size of that output's recent statistics.
    * ``samples``: rows measured since the reference was loaded or the measurement began anew.
    * ``changed``: the change detector's alarm is up.
    * ``at``: when the newest sample was measured, in Unix seconds.
    * ``plan``: the plan by which the measured version was loaded (:attr:`service.models.plan.Plan.digest`); "" if the
      measuring side knows no plans.
    """

    model: str
    version: int
    state: State = "unknown"
    cause: Cause = "none"
    output: str = ""
    metric: str = ""
    ratio: float = 0.0
    low: float = 0.0
    high: float = math.inf
    effective_samples: float = 0.0
    samples: int = 0
    changed: bool = False
    at: float = 0.0
    plan: str = ""

    @property
    def status(self) -> tuple[State, Cause, bool]:
        """The fields whose change is reported at once."""
        return self.state, self.cause, self.changed
