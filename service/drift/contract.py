"""What the server and live drift tell each other: the sections of ``serving.yaml``, and the verdict on recent drift."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, field_validator, model_validator

State = Literal["unknown", "within", "over"]
Cause = Literal["none", "rounding", "broken", "out_of_range"]
LONGEST_STAY_S = 86_400.0  # after a day in bf16, what led to the last fallback is another story


class ShadowPolicy(BaseModel):
    """The policy that selects the live requests to run again on the fp32 reference.

    ``rate`` of the requests, but at least 0.5 a second while so many come, and at most ``max_per_second``, which wins
    over the floor. So a quiet model is measured whole, and a busy one costs little. ``rate`` 0 turns the shadow off;
    the reference is then never loaded.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    rate: float = Field(
        default=0.01,
        ge=0,
        le=1,
        description="Share of requests that run again on the fp32 reference, but at least 0.5 a second and worker if"
        " so many come; 0 = none, and the reference is never loaded.",
    )
    max_per_second: float = Field(
        default=1.0,
        gt=0,
        description="Most samples per second on average, of all workers; the target is 0.8 of it, bursts are up to 48"
        " s of it.",
    )
    max_rows: PositiveInt = Field(default=8, description="Rows measured of one request, chosen at random.")

    @model_validator(mode="before")
    @classmethod
    def _not_off(cls, value: Any) -> Any:
        if isinstance(value, (bool, str)):  # YAML reads the word off as False
            raise ValueError("give keys, such as {rate: 0}, which measures nothing")
        return value

    @property
    def on(self) -> bool:
        """Whether anything is measured."""
        return self.rate > 0


class FallbackPolicy(BaseModel):
    """The action when a model's drift is over its budget: ``off``, ``alert`` or ``fp32``.

    ``off`` only measures. ``alert`` reports it in the log and in every description of the model. ``fp32`` also has the
    fp32 reference answer until bf16 is within budget again.

    The numbers apply to ``fp32`` only. fp32 answers for at least ``min_stay_seconds`` after bf16 was last over. That
    time doubles each time bf16 falls again within :data:`LONGEST_STAY_S`, which is also its maximum. bf16 answers
    again once there are ``clean_samples`` effective samples since the fallback and their whole interval is clearly
    below the budget.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: Literal["off", "alert", "fp32"] = Field(
        default="alert",
        description="`off`: only measure. `alert`: report a breach. `fp32`: the reference serves until bf16 is within"
        " budget.",
    )
    min_stay_seconds: float = Field(
        default=300.0,
        ge=0,
        le=LONGEST_STAY_S,
        description="Least time that fp32 serves; it doubles each time that bf16 goes over the budget again, to a day.",
    )
    clean_samples: int = Field(  # recent drift holds at most 1,090
        default=200, ge=1, le=1000, description="Effective samples since the fallback, before bf16 serves again."
    )

    @model_validator(mode="before")
    @classmethod
    def _from_scalar(cls, value: Any) -> Any:
        return {"policy": value} if isinstance(value, (str, bool)) else value

    @field_validator("policy", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML reads the word off as False


@dataclass(frozen=True, slots=True)
class DriftVerdict:
    """Recent drift against the budget, and whether it has changed. By default, nothing was measured.

    * ``state``: ``over`` once it is established beyond chance, although it is looked at after every sample, until 1 is
      in the 95 % interval again; ``within`` if every bound is met
      (:attr:`bf16kit.service.drift.estimates.Estimate.within`); ``unknown`` otherwise.
    * ``cause``: the diagnosis (:func:`bf16kit.service.drift.detector.diagnose`).
    * ``output``, ``metric``: the bound that is most over or nearest to a breach; "" if nothing is bounded or measured.
    * ``ratio``: drift ÷ budget of that bound; ``low`` and ``high``: its interval. Any of the three may be infinite.
    * ``effective_samples``: effective sample size of that output's recent statistics.
    * ``samples``: rows measured since the reference was loaded or the measurement began anew.
    * ``changed``: the change detector's alarm is up.
    * ``at``: when the newest sample was measured, in :func:`time.monotonic` seconds, the same in all processes here.
    * ``plan``: the plan by which the measured version was loaded (:attr:`bf16kit.service.models.plan.Plan.digest`); ""
      if the measuring side knows no plans.
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
