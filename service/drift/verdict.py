"""What is known of a model's recent drift, in one value: what the fallback, the page and the log go by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Self, get_args

State = Literal["unknown", "within", "over"]
Cause = Literal["none", "rounding", "broken", "out_of_range"]
STATES: tuple[State, ...] = get_args(State)
CAUSES: tuple[Cause, ...] = get_args(Cause)


@dataclass(frozen=True, slots=True)
class DriftVerdict:
    """Recent drift against the budget, and what has changed.

    ``state``: ``over`` and ``within`` are said with 95 % confidence, ``unknown`` where the interval holds 1 or too few
    samples speak. ``cause`` is the diagnosis (:mod:`service.drift.diagnosis`). ``output`` and ``metric`` name the bound
    that is nearest to a breach, or most over it ("" while nothing is bounded or measured); ``ratio`` is drift ÷ budget
    of it, ``low`` and ``high`` its interval, and any of them may be infinite. ``effective_samples`` are those of the
    recent statistics of that output, ``samples`` the rows measured since the reference was loaded or the measuring
    began anew. ``changed``: the change detector's alarm is up. ``at``: Unix seconds when the newest sample was
    measured. ``plan``: what was measured was loaded by this plan (:attr:`service.models.plan.Plan.digest`); "" where
    whoever measures does not know plans.
    """

    model: str
    version: int
    state: State
    cause: Cause
    output: str
    metric: str
    ratio: float
    low: float
    high: float
    effective_samples: float
    samples: int
    changed: bool
    at: float
    plan: str = ""

    @classmethod
    def unknown(cls, model: str, version: int) -> Self:
        """Of a model of which nothing was measured."""
        return cls(model, version, "unknown", "none", "", "", 0.0, 0.0, math.inf, 0.0, 0, False, 0.0)

    def of(self, plan: str) -> Self:
        """The same verdict, of what was loaded by ``plan``."""
        return replace(self, plan=plan)

    @property
    def told(self) -> tuple[State, Cause, bool]:
        """What somebody is to hear at once when it is another than before."""
        return self.state, self.cause, self.changed

    def to_json(self) -> dict[str, Any]:
        """The fields by name. JSON has no word for what is not finite: it is a string, as ``inf``."""
        return {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Self:
        """What :meth:`to_json` wrote. Raises ValueError for another state or cause, KeyError for a field that is not
        there."""
        if told["state"] not in STATES or told["cause"] not in CAUSES:
            raise ValueError(f"a verdict of state {told['state']!r} and cause {told['cause']!r}")
        return cls(
            model=str(told["model"]),
            version=int(told["version"]),
            state=told["state"],
            cause=told["cause"],
            output=str(told["output"]),
            metric=str(told["metric"]),
            ratio=float(told["ratio"]),
            low=float(told["low"]),
            high=float(told["high"]),
            effective_samples=float(told["effective_samples"]),
            samples=int(told["samples"]),
            changed=bool(told["changed"]),
            at=float(told["at"]),
            plan=str(told["plan"]),
        )
