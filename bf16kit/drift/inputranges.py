"""The ranges of a model's inputs over the samples of its drift measurement.

The budget was checked only for inputs in these ranges.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from bf16kit.artifact.entries import STRICT

# A few samples do not contain the largest possible value. So a value counts as inside when it exceeds theirs by less
# than half of the range (0 included). An overflow is farther off.
SLACK = 0.5

Finite = Annotated[float, Field(allow_inf_nan=False)]


class InputRange(BaseModel):
    """The smallest and the largest finite value of one input; ``nonfinite`` if it had other values, too.

    Both are 0 when there was no finite value.
    """

    model_config = STRICT

    low: Finite
    high: Finite
    nonfinite: bool = False

    @classmethod
    def of(cls, array: NDArray[Any]) -> Self | None:
        """Return the range of one array; None if it has no range: strings, booleans, or an empty array."""
        if (array.dtype.kind not in "iuf" and array.dtype.name != "bfloat16") or array.size == 0:
            return None
        finite = array if array.dtype.kind in "iu" else array[np.isfinite(array)]
        if not finite.size:
            return cls(low=0.0, high=0.0, nonfinite=True)
        return cls(low=float(finite.min()), high=float(finite.max()), nonfinite=finite.size < array.size)

    def joined(self, other: InputRange) -> InputRange:
        """Return the range that covers both."""
        return InputRange(
            low=min(self.low, other.low), high=max(self.high, other.high), nonfinite=self.nonfinite or other.nonfinite
        )

    @property
    def reach(self) -> tuple[float, float]:
        """The interval beyond which a value is outside: it contains 0 and the :data:`SLACK` on either side."""
        low, high = min(self.low, 0.0), max(self.high, 0.0)
        slack = SLACK * (high - low)
        return low - slack, high + slack

    def outside(self, array: NDArray[Any]) -> NDArray[np.bool_]:
        """Return a mask of the elements that are outside, of the shape of ``array``."""
        low, high = self.reach
        out = (array < low) | (array > high)
        if array.dtype.kind in "iu":
            return np.asarray(out)
        infinite = ~np.isfinite(array)
        return np.asarray(np.where(infinite, not self.nonfinite, out))

    def __str__(self) -> str:
        return f"{self.low:.6g} to {self.high:.6g}{', and not finite' if self.nonfinite else ''}"


def input_ranges(feeds: Iterable[Mapping[str, NDArray[Any]]]) -> dict[str, InputRange]:
    """Return the range of each input over all ``feeds``."""
    found: dict[str, InputRange] = {}
    for feed in feeds:
        for name, array in feed.items():
            one = InputRange.of(array)
            if one is not None:
                found[name] = one.joined(found[name]) if name in found else one
    return found
