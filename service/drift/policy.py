"""``serving.yaml``'s part on live drift: what is measured of it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, PositiveInt


class ShadowPolicy(BaseModel):
    """Which live requests are run again on the fp32 reference.

    The defaults cost little on a busy model (one request in a hundred, one a second at most) and still give an idle one
    a sample now and then. ``rate`` 0 turns the shadow off, and the reference is then never loaded.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    rate: float = Field(default=0.01, ge=0, le=1)
    max_per_second: float = Field(default=1.0, gt=0)
    max_rows: PositiveInt = 8  # of one request; the rest of a larger one is not measured
    max_bytes: PositiveInt = 64 << 20  # of the samples that wait, inputs and outputs
