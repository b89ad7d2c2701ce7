"""``serving.yaml``'s part on the fallback: what is done about a model whose drift is over its budget."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class FallbackPolicy(BaseModel):
    """``off`` measures, and no more; ``alert`` says so, in the log and wherever the model is described; with ``fp32``
    the fp32 reference answers until bf16 is sound again.

    The numbers are for ``fp32``. ``min_stay_seconds`` is the least that fp32 answers after bf16 was over, twice as long
    each time that bf16 did not hold for ``longest_stay_seconds``, and never longer than that. bf16 answers again when
    ``clean_samples`` effective samples since the fall are below the budget by ``margin``, a share of it, with their
    whole interval.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: Literal["off", "alert", "fp32"] = "alert"
    min_stay_seconds: float = Field(default=300.0, ge=0, le=604_800)
    longest_stay_seconds: float = Field(default=86_400.0, ge=0, le=2_592_000)
    clean_samples: int = Field(default=200, ge=1, le=1000)  # effective ones; recent drift is worth at most 1,090
    margin: float = Field(default=0.1, ge=0, lt=1)
    retry_seconds: float = Field(default=60.0, gt=0, le=86_400)  # after the reference could not be loaded

    @model_validator(mode="before")
    @classmethod
    def _word(cls, value: Any) -> Any:
        return {"policy": value} if isinstance(value, (str, bool)) else value

    @field_validator("policy", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        if value is False:  # what YAML makes of the word off
            return "off"
        if value == "none":
            raise ValueError("'none' is called 'off' now; the policies are off, alert and fp32")
        if value is True:
            raise ValueError("'on' says not what to do; the policies are off, alert and fp32")
        return value

    @model_validator(mode="after")
    def _stays_grow(self) -> FallbackPolicy:
        if self.longest_stay_seconds < self.min_stay_seconds:
            raise ValueError(
                f"longest_stay_seconds is {self.longest_stay_seconds:g}, less than min_stay_seconds,"
                f" {self.min_stay_seconds:g}"
            )
        return self
