"""The histograms' buckets and the labels' values. None comes from clients, so there are few."""

from __future__ import annotations

import math
from typing import Literal

# 100 µs (a small MLP on the machine itself) to 10 s.
SECONDS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
# One row to 1,024.
ROWS = tuple(float(2**k) for k in range(11))
# From a hundredth of bf16's unit roundoff to the loss of the whole output. The default budget, 1.5e-2, is a bound.
RELATIVE_L2 = (3e-5, 1e-4, 3e-4, 1e-3, 2e-3, 3e-3, 5e-3, 7.5e-3, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.3, 1.0)
# About the square of the above; the default budget, 5e-4, is a bound. 2 = opposite directions.
COSINE = (1e-8, 1e-7, 1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 2e-4, 5e-4, 1e-3, 1e-2, 0.1, 1.0, 2.0)
# In the output's own unit, hence decades: from probabilities to unscaled regressions.
MAX_ABS = tuple(10.0**k for k in range(-6, 5))

CODES = (
    "OK", "CANCELLED", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND",
    "RESOURCE_EXHAUSTED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE",
)  # fmt: skip
REJECTIONS = ("queue_full", "queue_wait", "queue_bytes", "deadline", "cancelled", "draining")
Outcome = Literal["measured", "dropped", "failed"]
OUTCOMES: tuple[Outcome, ...] = ("measured", "dropped", "failed")
GateOutcome = Literal["passed", "failed", "error"]
GATE_OUTCOMES: tuple[GateOutcome, ...] = ("passed", "failed", "error")
Precision = Literal["bf16", "fp32"]
PRECISIONS: tuple[Precision, ...] = ("bf16", "fp32")
CAUSES = ("rounding", "broken", "out_of_range")  # causes of a breach: see service.drift.diagnosis
TraceOutcome = Literal["exported", "dropped", "failed"]
TRACE_OUTCOMES: tuple[TraceOutcome, ...] = ("exported", "dropped", "failed")
# One infinite value would make a sum infinite for good, and no rate could be computed from it.
LARGEST_DRIFT = 1e9


def finite(drift: float) -> float:
    """Return ``drift``, or the largest drift in its place if it is larger or not finite."""
    return drift if math.isfinite(drift) and drift < LARGEST_DRIFT else LARGEST_DRIFT
