"""Diagnoses a model whose drift is over budget or has changed: one of two causes, by rules that a person can follow.

A bad row drifts clearly more than expected: by at least a factor of 2 and by at least two spreads. A row whose output
is not finite is bad as well. The rules look at the rows since the change, or at all recent rows if nothing changed:

1. ``broken``: an output is not finite; or half of the bad rows' weight drifts at least :data:`BROKEN` times the
   expected drift and at least four spreads more. Rounding to bf16 costs about one bit in some rows; it does not cost
   two bits in row after row. If no drift is expected yet, the limit is a drift of :data:`LOST`, which leaves little of
   the output.
2. ``rounding``: everything else that is over budget or has changed. The noise is of the measured kind, but it is more
   than the budget allows, or more than before.

A third cause, ``out_of_range``, is that of requests with inputs outside the calibrated range, which are judged apart
(:mod:`service.drift.comparison`).
"""

from __future__ import annotations

import math

from service.drift.detector import DOUBLING, Expected, log_drift
from service.drift.intervals import quantile
from service.drift.recent import Window
from service.drift.verdict import Cause

BROKEN = 4.0
LOST = 0.3
_WORST_FIRST: tuple[Cause, ...] = ("broken", "rounding", "none")


def diagnose(window: Window, expected: Expected | None, metric: str = "relative_l2") -> Cause:
    """Return the cause for an output that is over budget or has changed. ``window`` holds at least one row.

    ``metric`` is the one that is ``expected``.
    """
    drift, weights = log_drift(window[metric if expected else "relative_l2"]), window.weights
    centre, spread = (expected.centre, expected.spread) if expected else (math.log(LOST), 0.0)
    nonfinite = window["nonfinite"] > 0
    bad = nonfinite | (drift > centre + max(DOUBLING if expected else 0.0, 2 * spread))
    if not bad.any():
        return "rounding"
    broken = centre + max(math.log(BROKEN) if expected else 0.0, 4 * spread)
    if nonfinite.any() or quantile(drift[bad], weights[bad], 0.5, 1.0).estimate >= broken:
        return "broken"
    return "rounding"


def worst_cause(causes: list[Cause]) -> Cause:
    """Return the worst cause of several outputs; "none" without any."""
    return min(causes, key=_WORST_FIRST.index, default="none")
