"""``serving.yaml``'s section on the fallback: the action when a model's drift is over its budget."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class FallbackPolicy(BaseModel):
    """The action when a model's drift is over its budget: ``off``, ``alert`` or ``fp32``.

    ``off`` only measures. ``alert`` reports it in the log and in every description of the model. ``fp32`` also has the
    fp32 reference answer until bf16 is within budget again.

    The numbers apply to ``fp32`` only. fp32 answers for at least ``min_stay_seconds`` after bf16 was last over. That
    time doubles each time bf16 falls again within ``longest_stay_seconds``, which is also its maximum. bf16 answers
    again once there are ``clean_samples`` effective samples since the fall and their whole interval is below the budget
    by ``margin``, a share of the budget.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: Literal["off", "alert", "fp32"] = "alert"
    min_stay_seconds: float = Field(default=300.0, ge=0, le=604_800)
    longest_stay_seconds: float = Field(default=86_400.0, ge=0, le=2_592_000)
    clean_samples: int = Field(default=200, ge=1, le=1000)  # effective samples; recent drift holds at most 1,090
    margin: float = Field(default=0.1, ge=0, lt=1)
    retry_seconds: float = Field(default=60.0, gt=0, le=86_400)  # after the reference could not be loaded

    @model_validator(mode="before")
    @classmethod
    def _from_scalar(cls, value: Any) -> Any:
        return {"policy": value} if isinstance(value, (str, bool)) else value

    @field_validator("policy", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        if value is False:  # YAML reads the word off as False
            return "off"
        if value == "none":
            raise ValueError("'none' is called 'off' now; the policies are off, alert and fp32")
        if value is True:
            raise ValueError("'on' is not a policy; use off, alert or fp32")
        return value

    @model_validator(mode="after")
    def _ordered_stays(self) -> FallbackPolicy:
        if self.longest_stay_seconds < self.min_stay_seconds:
            raise ValueError(
                f"longest_stay_seconds is {self.longest_stay_seconds:g}, less than min_stay_seconds,"
                f" {self.min_stay_seconds:g}"
            )
        return self
