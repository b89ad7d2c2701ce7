"""When fp32 serves instead of bf16, and when bf16 serves again: the decision alone, on verdicts made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bf16kit.drift.metrics import Budget
from service.drift.fallback import Fallback, describe
from service.drift.fallbackpolicy import FallbackPolicy
from service.drift.gate import breach_verdict
from service.drift.verdict import DriftVerdict

WITHIN = DriftVerdict("m", 1, "within", "none", "y", "relative_l2", 0.5, 0.4, 0.6, 300.0, 400, False, 1.0)
OVER = replace(WITHIN, state="over", cause="rounding", ratio=1.5, low=1.2, high=1.8)
UNKNOWN = replace(WITHIN, state="unknown", ratio=1.0, low=0.8, high=1.2)
FP32 = FallbackPolicy(policy="fp32", min_stay_seconds=100, longest_stay_seconds=800, retry_seconds=10)


def fallen(policy: FallbackPolicy = FP32, now: float = 0.0) -> Fallback:
    """Return a fallback in which fp32 serves since ``now``."""
    fallback = Fallback(policy, now)
    assert fallback.receive(OVER, now)
    fallback.warmed(now)
    return fallback


def test_only_a_confident_breach_triggers_the_fallback_and_fp32_is_warmed_first() -> None:
    fallback = Fallback(FP32, 0.0)
    for verdict in (UNKNOWN, WITHIN, replace(UNKNOWN, changed=True)):
        assert not fallback.receive(verdict, 1.0)
    assert (fallback.phase, fallback.reason) == ("bf16", "")
    assert fallback.receive(OVER, 2.0)
    assert fallback.phase == "warming"
    assert fallback.reason == describe(OVER)
    fallback.warmed(3.0)
    assert (fallback.phase, fallback.reason) == ("fp32", describe(OVER))


def test_the_description_of_a_breach_has_its_bound_its_size_and_its_cause() -> None:
    said = describe(replace(OVER, cause="broken"))
    assert said.startswith(
        "relative_l2 of output 'y' is 1.5 times its budget (95 %: 1.2 to 1.8, 300 effective samples)"
    )
    assert said.endswith("something is broken")
    assert describe(replace(OVER, cause="none")).endswith("samples)")
    assert describe(breach_verdict("m", 1, [], Budget({}), 1, 1.0)) == "the golden samples can no longer be run"


@pytest.mark.parametrize(
    "unclean",
    [
        replace(WITHIN, effective_samples=199.0),
        replace(WITHIN, high=0.91),
        replace(WITHIN, changed=True),
        replace(WITHIN, state="unknown"),
        OVER,
    ],
    ids=["few samples", "near the budget", "changed", "not sure", "over"],
)
def test_bf16_returns_only_after_enough_clean_samples_clearly_below_the_budget(unclean: DriftVerdict) -> None:
    fallback = fallen()
    assert not fallback.receive(unclean, 1000.0)
    assert fallback.phase == "fp32"
    assert fallback.receive(WITHIN, 1100.0)
    assert (fallback.phase, fallback.reason) == ("bf16", "")


def test_fp32_serves_for_the_minimum_stay_whatever_is_measured() -> None:
    fallback = fallen()
    assert not fallback.receive(WITHIN, 99.0)
    assert fallback.receive(WITHIN, 100.0)


def test_the_stay_starts_again_when_bf16_is_over_budget_again() -> None:
    fallback = fallen()
    fallback.receive(OVER, 90.0)
    assert not fallback.receive(WITHIN, 189.0)
    assert fallback.receive(WITHIN, 190.0)


def test_the_stay_doubles_with_each_fallback_up_to_the_longest_stay() -> None:
    fallback, now, stays = fallen(), 0.0, []
    for _ in range(5):
        stays.append(fallback.stay)
        assert not fallback.receive(WITHIN, now + stays[-1] - 1)
        now += stays[-1]
        assert fallback.receive(WITHIN, now)
        assert fallback.receive(OVER, now + 1)
        now += 2
        fallback.warmed(now)
    assert stays == [100, 200, 400, 800, 800]


def test_the_stay_is_short_again_after_bf16_has_served_for_the_longest_stay() -> None:
    fallback = fallen()
    fallback.receive(WITHIN, 100.0)
    fallback.receive(OVER, 899.0)
    fallback.warmed(899.0)
    assert fallback.stay == 200
    fallback.receive(WITHIN, 1100.0)
    fallback.receive(OVER, 1900.0)
    fallback.warmed(1900.0)
    assert fallback.stay == 100


def test_if_fp32_cannot_serve_bf16_does_and_fp32_is_tried_again_later() -> None:
    fallback = Fallback(FP32, 0.0)
    fallback.receive(OVER, 1.0)
    fallback.failed("no room", 2.0)
    assert fallback.phase == "bf16"
    assert fallback.reason == f"{describe(OVER)}; fp32 cannot answer: no room"
    assert not fallback.receive(OVER, 11.0)
    assert fallback.receive(OVER, 12.0)
    assert (fallback.phase, fallback.reason) == ("warming", describe(OVER))


def test_verdicts_during_the_warm_up_change_nothing() -> None:
    fallback = Fallback(FP32, 0.0)
    fallback.receive(OVER, 1.0)
    for verdict in (WITHIN, OVER, UNKNOWN):
        assert not fallback.receive(verdict, 2.0)
    assert fallback.phase == "warming"


def test_alert_gives_the_reason_until_drift_is_within_budget_and_bf16_keeps_serving() -> None:
    fallback = Fallback(FallbackPolicy(policy="alert"), 0.0)
    assert fallback.receive(OVER, 1.0)
    assert (fallback.phase, fallback.reason) == ("bf16", describe(OVER))
    assert not fallback.receive(replace(OVER, ratio=2.0), 2.0), "said once"
    assert not fallback.receive(UNKNOWN, 3.0)
    assert fallback.reason
    assert fallback.receive(WITHIN, 4.0)
    assert fallback.reason == ""


def test_off_reports_nothing_and_does_nothing() -> None:
    fallback = Fallback(FallbackPolicy(policy="off"), 0.0)
    assert not fallback.receive(OVER, 1.0)
    assert (fallback.phase, fallback.reason) == ("bf16", "")
