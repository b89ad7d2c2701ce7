"""``serving.yaml``'s section on live drift: how much of it is measured."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, PositiveInt


class ShadowPolicy(BaseModel):
    """The policy that selects the live requests to run again on the fp32 reference.

    ``rate`` of the requests, but at least ``min_per_second`` while so many come, and at most ``max_per_second``, which
    wins over the floor. So a quiet model is measured whole, and a busy one costs little. ``rate`` 0 turns the shadow
    off; the reference is then never loaded.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    rate: float = Field(default=0.01, ge=0, le=1)
    min_per_second: float = Field(default=0.5, ge=0)  # 0: no floor
    max_per_second: float = Field(default=1.0, gt=0)
    max_rows: PositiveInt = 8  # per request; further rows of a larger request are not measured
    max_bytes: PositiveInt = 64 << 20  # inputs and outputs of the waiting samples

    @property
    def on(self) -> bool:
        """Whether anything is measured."""
        return self.rate > 0
