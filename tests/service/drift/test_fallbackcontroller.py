"""When fp32 answers instead of bf16, and when bf16 answers again: the decision, and the orders that follow from it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from bf16kit.drift.metrics import Budget, SampleDrift
from bf16kit.messages.errors import ArtifactError, RuntimeFailure
from service.drift import fallbackcontroller
from service.drift.driftpolicy import LONGEST_STAY_S, FallbackPolicy
from service.drift.estimates import estimates
from service.drift.fallbackcontroller import RETRY_S, ActivePlan, Fallback, FallbackController, PrecisionOrder, describe
from service.drift.gate import breach_verdict
from service.drift.recent import RecentRows
from service.drift.verdict import DriftVerdict, State
from service.request import Precision

WITHIN = DriftVerdict("m", 1, "within", "none", "y", "relative_l2", 0.5, 0.4, 0.6, 300.0, 400, False, 100.0, "plan")
OVER = replace(WITHIN, state="over", cause="rounding", ratio=1.5, low=1.2, high=1.8)
UNKNOWN = replace(WITHIN, state="unknown", ratio=1.0, low=0.8, high=1.2)
FP32 = FallbackPolicy(policy="fp32", min_stay_seconds=10)

# --- the decision, on verdicts made by hand ---------------------------------------------------------------------------


def fallen() -> Fallback:
    """Return a fallback in which fp32 serves since 0 s."""
    fallback = Fallback(ActivePlan("plan", 0.0, FP32), 0.0)
    assert fallback.receive(OVER, 0.0)
    fallback.warmed(0.0)
    return fallback


def test_the_description_of_a_breach_has_its_bound_its_size_and_its_cause() -> None:
    said = describe(replace(OVER, cause="broken"))
    assert said.startswith(
        "relative_l2 of output 'y' is 1.5 times its budget (95 %: 1.2 to 1.8, 300 effective samples)"
    )
    assert said.endswith("something is broken")
    assert describe(replace(OVER, cause="none")).endswith("samples)")
    assert describe(breach_verdict("m", 1, [], Budget({}), 1, 1.0)) == "the golden samples can no longer be run"


def test_the_stay_doubles_with_each_fallback_up_to_a_day_and_is_short_after_a_day_in_bf16() -> None:
    fallback, now, stays = fallen(), 0.0, []
    for _ in range(16):
        stays.append(fallback.stay)
        assert not fallback.receive(WITHIN, now + stays[-1] - 1)
        now += stays[-1]
        assert fallback.receive(WITHIN, now)
        assert fallback.receive(OVER, now + 1)
        now += 2
        fallback.warmed(now)
    assert stays == [10 * 2.0**number for number in range(14)] + [LONGEST_STAY_S] * 2
    assert fallback.receive(WITHIN, now + LONGEST_STAY_S)
    assert fallback.receive(OVER, now + 2 * LONGEST_STAY_S)
    fallback.warmed(now + 2 * LONGEST_STAY_S)
    assert fallback.stay == 10


# --- a model on the border of its budget ------------------------------------------------------------------------------
# Flapping means more than two changes of the precision in a day. At one sample a second, 100,000 samples are 28 hours.

SAMPLES = 100_000
EVERY = 10  # samples between two verdicts: recent drift has a half-life of hundreds, so hardly anything is missed
BUDGET = Budget.from_dict({"relative_l2": 0.015})
SPREAD = 0.5  # of log drift between requests
HASTY = FallbackPolicy(policy="fp32", min_stay_seconds=0, clean_samples=1)  # and judged by the narrow interval


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
    fallback, recent, changes = Fallback(ActivePlan("plan", 0.0, policy), 0.0), RecentRows(), list[float]()
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
def test_without_hysteresis_the_model_flaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples are the same, which shows that the test above can fail."""
    monkeypatch.setattr(fallbackcontroller, "MARGIN", 0.0)
    assert len(transitions(waves, HASTY, seed=1)) > 20


# --- the orders -------------------------------------------------------------------------------------------------------


class Rig:
    """Serving processes whose orders end when the test says so, and a clock that the test sets."""

    def __init__(self, policy: FallbackPolicy = FP32) -> None:
        self.now = 0.0
        self.serves: ActivePlan | None = ActivePlan("plan", 50.0, policy)
        self.orders: list[tuple[Precision, str]] = []
        self.told: list[Future[None]] = []
        self.transitions: list[Precision] = []
        self.restarts: list[tuple[str, int]] = []
        self.controller = FallbackController(self, lambda *key: self.restarts.append(key), clock=lambda: self.now)
        assert self.receive(replace(WITHIN, state="unknown")) == ["bf16"], "which is what it begins with"
        self.orders.clear()
        self.told.clear()

    def fall_back(self) -> None:
        self.receive(OVER)
        self.told[-1].set_result(None)

    def active_plan(self, model: str, version: int) -> ActivePlan | None:
        return self.serves if (model, version) == ("m", 1) else None

    def order(self, order: PrecisionOrder) -> Future[None]:
        assert (order.model, order.version) == ("m", 1)
        assert self.serves is not None
        assert order.plan == self.serves.plan
        self.orders.append((order.precision, order.reason))
        self.told.append(Future())
        return self.told[-1]

    def transition(self, model: str, version: int, to: Precision) -> None:
        self.transitions.append(to)

    def receive(self, *verdicts: DriftVerdict) -> list[Precision]:
        """Return the precisions ordered because of ``verdicts``."""
        before = len(self.orders)
        for verdict in verdicts:
            self.controller.receive(verdict)
        return [precision for precision, _ in self.orders[before:]]


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_fp32_serves_after_a_breach_and_bf16_after_a_clean_time(rig: Rig) -> None:
    assert rig.receive(UNKNOWN, WITHIN, replace(UNKNOWN, changed=True)) == []
    assert rig.receive(OVER, OVER, WITHIN) == ["fp32"], "once, and not before a breach is established"
    assert rig.orders == [("fp32", describe(OVER))]
    assert (rig.transitions, rig.restarts) == ([], [])
    rig.told[0].set_result(None)
    assert (rig.transitions, rig.restarts) == (["fp32"], [("m", 1)])
    assert rig.receive(WITHIN) == [], "the minimum stay"
    rig.now = 11.0
    assert rig.receive(OVER, WITHIN) == [], "the stay begins again"
    rig.now = 20.9
    assert rig.receive(WITHIN) == []
    rig.now = 21.0
    assert rig.receive(WITHIN, WITHIN) == ["bf16"]
    assert rig.orders[-1] == ("bf16", "")
    assert (rig.transitions, rig.restarts) == (["fp32", "bf16"], [("m", 1)] * 2)


def test_an_order_may_be_carried_out_at_once(rig: Rig) -> None:
    """It is carried out on the thread that gives it."""
    done: Future[None] = Future()
    done.set_result(None)
    rig.order = lambda order: done  # type: ignore[method-assign]
    rig.receive(OVER)
    assert rig.transitions == ["fp32"]


@pytest.mark.parametrize(
    ("error", "public"), [(ArtifactError("no residual"), "no residual"), (RuntimeFailure("0xbad"), "the server's log")]
)
def test_if_fp32_cannot_be_loaded_bf16_stays_and_fp32_is_tried_again(
    rig: Rig, error: Exception, public: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        assert rig.receive(OVER) == ["fp32"]
        rig.told[0].set_exception(error)
    assert str(error) in caplog.text
    assert rig.orders[-1][0] == "bf16"
    assert rig.orders[-1][1].startswith(f"{describe(OVER)}; fp32 cannot answer: {public}")
    assert (rig.transitions, rig.restarts) == ([], [])
    rig.now = RETRY_S - 0.1
    assert rig.receive(OVER) == []
    rig.now = RETRY_S
    assert rig.receive(OVER) == ["fp32"]
    assert rig.orders[-1] == ("fp32", describe(OVER))


def test_a_replacement_is_ordered_to_serve_bf16_without_a_verdict(rig: Rig) -> None:
    """The replacement may never be sampled."""
    rig.fall_back()
    rig.serves = ActivePlan("plan", 60.0, FP32)
    rig.controller.maintain()
    assert [precision for precision, _ in rig.orders] == ["fp32", "bf16"]
    rig.controller.maintain()
    assert len(rig.orders) == 2, "once"


def test_a_reference_loaded_for_a_replaced_generation_is_not_a_transition(rig: Rig) -> None:
    rig.receive(OVER)
    rig.serves = ActivePlan("another", 90.0, FP32)
    rig.receive(WITHIN)
    rig.told[0].set_result(None)
    assert rig.transitions == []


def test_verdicts_on_a_model_that_is_not_served_are_ignored(rig: Rig) -> None:
    rig.serves = None
    assert rig.receive(OVER, replace(OVER, model="other")) == []


@pytest.mark.parametrize(
    ("policy", "ordered", "levels"),
    [("alert", [("bf16", describe(OVER)), ("bf16", "")], ["ERROR", "INFO"]), ("off", [], [])],
)
def test_an_alert_is_logged_once_and_its_reason_is_sent_to_the_processes(
    caplog: pytest.LogCaptureFixture, policy: Literal["alert", "off"], ordered: list[object], levels: list[str]
) -> None:
    rig = Rig(FallbackPolicy(policy=policy))
    with caplog.at_level(logging.INFO):
        rig.receive(OVER, OVER, WITHIN)
    assert (rig.orders, [record.levelname for record in caplog.records]) == (ordered, levels)
    assert all("model 'm' version 1" in record.getMessage() for record in caplog.records)


def test_the_order_of_fp32_is_repeated_while_fp32_should_serve(rig: Rig) -> None:
    """A restarted process may have failed to load the reference when no caller waited for its response."""
    rig.fall_back()
    rig.now = RETRY_S - 1
    rig.controller.maintain()
    assert len(rig.orders) == 1
    rig.now = RETRY_S
    rig.controller.maintain()
    rig.controller.maintain()
    assert [precision for precision, _ in rig.orders] == ["fp32", "fp32"]
    assert rig.transitions == ["fp32"]
    rig.now += 20.0
    rig.receive(WITHIN)
    rig.now += RETRY_S
    rig.controller.maintain()
    assert [precision for precision, _ in rig.orders] == ["fp32", "fp32", "bf16"]
