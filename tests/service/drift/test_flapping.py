"""A model on the border of its budget does not flap. The tests use the server's statistics and a simulated clock.

Flapping means more than two changes of the precision in a day. At one sample a second, 100,000 samples are 28 hours.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from bf16kit.drift.metrics import Budget, SampleDrift
from service.drift.fallback import Fallback
from service.drift.fallbackpolicy import FallbackPolicy
from service.drift.recent import RecentRows, estimates
from service.drift.verdict import DriftVerdict, State

SAMPLES = 100_000
EVERY = 10  # samples between two verdicts: recent drift has a half-life of hundreds, so hardly anything is missed
BUDGET = Budget.from_dict({"relative_l2": 0.015})
SPREAD = 0.5  # of log drift between requests
HASTY = FallbackPolicy(
    policy="fp32", min_stay_seconds=0, longest_stay_seconds=0, clean_samples=1, margin=0.0
)  # without any of the settings that prevent flapping, and judged by the narrow interval


def verdict_of(recent: RecentRows, second: float, *, hasty: bool) -> DriftVerdict:
    """Return the verdict of :class:`service.drift.comparison.Comparison` on one bound; ``hasty``: by the 95 %."""
    window = recent.window()
    (found,) = estimates(window, BUDGET)
    over = (found.low if hasty else found.lowest) > 1
    state: State = "over" if over else "within" if found.high <= 1 else "unknown"
    return DriftVerdict(
        "m", 1, state, "none", "y", found.metric, found.ratio, found.low, found.high, window.size, 0, False, second
    )


def transitions(ratio: Callable[[float], float], policy: FallbackPolicy, seed: int) -> list[float]:
    """Return the times in seconds at which the precision changed; drift ÷ budget is ``ratio``, a function of time."""
    noise = np.random.default_rng(seed).standard_normal(SAMPLES) * SPREAD - SPREAD**2 / 2
    fallback, recent, changes = Fallback(policy, 0.0), RecentRows(), list[float]()
    for second in range(SAMPLES):
        drift = 0.015 * ratio(second) * math.exp(noise[second])
        recent.add([SampleDrift(drift, drift**2 / 2, drift, math.inf, 0, 0, 0)], 1.0)
        if second % EVERY or not fallback.receive(verdict_of(recent, second, hasty=policy is HASTY), second):
            continue
        if fallback.phase == "warming":
            fallback.warmed(second)
        changes.append(second)
        recent = RecentRows()  # the owner makes the shadow do the same
    return changes


def waves(second: float) -> float:
    """Return a ratio that varies between 0.97 and 1.03 with a period of one hour."""
    return 1 + 0.03 * math.sin(second / 3600 * math.tau)


@pytest.mark.parametrize("ratio", [waves, *(pytest.param(each, marks=pytest.mark.long) for each in (0.97, 1.0, 1.03))])
def test_a_model_on_the_border_does_not_flap(ratio: float | Callable[[float], float]) -> None:
    of = ratio if callable(ratio) else lambda second: ratio
    changes = transitions(of, FallbackPolicy(policy="fp32"), seed=1)
    assert len(changes) <= 2, changes


@pytest.mark.long
def test_without_hysteresis_the_model_flaps() -> None:
    """The samples are the same, which shows that the test above can fail."""
    assert len(transitions(waves, HASTY, seed=1)) > 20
