"""What ails a model whose drift is over its budget, or has changed: one of three, by rules that people can follow.

Bad rows are those that drift clearly more than is expected of a row: twice its drift, and two spreads; where the
output is not finite, too. Of the rows since the change (all recent ones, where nothing has changed):

1. ``out_of_range``: at least half of the bad rows' weight has inputs outside the calibrated range.
2. ``broken``: among the others an output is not finite, or half of the bad rows' weight drifts :data:`BROKEN` times
   what is expected, and four spreads, or more. Rounding to bf16 costs a bit here and there; it does not cost two in
   row after row. Where nothing is expected yet: a drift of :data:`LOST` or more, of which little of the output is left.
3. ``rounding``: everything else that is over budget or has changed. The noise is of the kind that was measured, and
   is more than the budget allows, or than it was.
"""

from __future__ import annotations

import math

from service.drift.detector import DOUBLING, Expected, log_drift
from service.drift.recent import Window
from service.drift.verdict import Cause
from service.drift.weighted import median

BROKEN = 4.0
LOST = 0.3
_WORST_FIRST: tuple[Cause, ...] = ("broken", "out_of_range", "rounding", "none")


def diagnose(window: Window, expected: Expected | None) -> Cause:
    """What ails an output that is over budget or has changed, by its ``window`` of rows, at least one."""
    drift, weights = log_drift(window["relative_l2"]), window.weights
    centre, spread = (expected.centre, expected.spread) if expected else (math.log(LOST), 0.0)
    nonfinite = window["nonfinite"] > 0
    bad = nonfinite | (drift > centre + max(DOUBLING if expected else 0.0, 2 * spread))
    if not bad.any():
        return "rounding"
    outside = window.outside & bad
    if 2 * weights[outside].sum() >= weights[bad].sum():
        return "out_of_range"
    broken = centre + max(math.log(BROKEN) if expected else 0.0, 4 * spread)
    if (nonfinite & ~window.outside).any() or median(drift[bad], weights[bad]) >= broken:
        return "broken"
    return "rounding"


def worst(causes: list[Cause]) -> Cause:
    """Of several outputs'."""
    return min(causes, key=_WORST_FIRST.index, default="none")
