"""The sums from which Prometheus computes the mean drift of all replicas, and its error.

The rules are in deploy/prometheus/rules/fleet.yml. A measured request has the weight W = Σw of its rows and the drift
X = Σw·x. Rows of one request are alike, so squares are of requests and not of rows, as in
:func:`service.drift.intervals.mean`. Sums of several replicas add up.
"""

from __future__ import annotations

from collections.abc import Sequence

METRICS = ("relative_l2", "cosine_distance")  # those whose budget is on the mean
MOMENTS = ("weight", "drift", "weight_squared", "weight_drift", "drift_squared")  # ΣW, ΣX, ΣW², ΣWX, ΣX²
LARGEST = 10.0  # the most that a row counts: the square of more would leave no digits for later rows


def moments(drifts: Sequence[float], weight: float) -> tuple[float, ...]:
    """Return one request's summands of :data:`MOMENTS`. Each of ``drifts`` is of a row that stands for ``weight`` rows.

    A NaN counts as :data:`LARGEST`.
    """
    whole = weight * len(drifts)
    drift = weight * sum(each if each < LARGEST else LARGEST for each in drifts)
    return whole, drift, whole**2, whole * drift, drift**2
