"""The verdict on a model's recent drift, which the fallback, the status page and the log act on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, Self, get_args

State = Literal["unknown", "within", "over"]
Cause = Literal["none", "rounding", "broken", "out_of_range"]
STATES: tuple[State, ...] = get_args(State)
CAUSES: tuple[Cause, ...] = get_args(Cause)


@dataclass(frozen=True, slots=True)
class DriftVerdict:
    """Recent drift against the budget, and whether it has changed.

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
        """Return the verdict for a model of which nothing was measured."""
        return cls(model, version, "unknown", "none", "", "", 0.0, 0.0, math.inf, 0.0, 0, False, 0.0)

    def with_plan(self, plan: str) -> Self:
        """Return the same verdict with ``plan`` set."""
        return replace(self, plan=plan)

    @property
    def status(self) -> tuple[State, Cause, bool]:
        """The fields whose change is reported at once."""
        return self.state, self.cause, self.changed

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name.

        Numbers that are not finite become strings such as ``inf``, since JSON cannot hold them.
        """
        return {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Parse :meth:`to_json`'s output.

        Raises ValueError for an unknown state or cause, and KeyError for a missing field.
        """
        if body["state"] not in STATES or body["cause"] not in CAUSES:
            raise ValueError(f"a verdict of state {body['state']!r} and cause {body['cause']!r}")
        return cls(**{each.name: _PARSERS.get(each.type, str)(body[each.name]) for each in fields(cls)})


# By a field's annotation. Floats that are not finite are strings in JSON.
_PARSERS: Mapping[Any, Callable[[Any], Any]] = {"float": float, "int": int, "bool": bool}
