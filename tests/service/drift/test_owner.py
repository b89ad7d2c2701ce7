"""The fallback's owner turns verdicts into orders: one for each change, and only for the generation that serves."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import replace

import pytest

from bf16kit.messages.errors import ArtifactError, RuntimeFailure
from service.drift.fallbackpolicy import FallbackPolicy
from service.drift.owner import ActivePlan, FallbackOwner, PrecisionOrder
from service.drift.verdict import DriftVerdict
from service.request import Precision

WITHIN = DriftVerdict("m", 1, "within", "none", "y", "relative_l2", 0.5, 0.4, 0.6, 300.0, 400, False, 100.0, "plan")
OVER = replace(WITHIN, state="over", cause="rounding", ratio=1.5, low=1.2, high=1.8)
FP32 = FallbackPolicy(policy="fp32", min_stay_seconds=10, retry_seconds=5)


class Rig:
    """Serving processes whose orders end when the test says so, and a clock that the test sets."""

    def __init__(self, policy: FallbackPolicy = FP32) -> None:
        self.now = 0.0
        self.serves: ActivePlan | None = ActivePlan("plan", 50.0, policy)
        self.orders: list[tuple[Precision, str]] = []
        self.told: list[Future[None]] = []
        self.transitions: list[Precision] = []
        self.restarts: list[tuple[str, int]] = []
        self.owner = FallbackOwner(self, lambda *key: self.restarts.append(key), clock=lambda: self.now)
        assert self.receive(replace(WITHIN, state="unknown")) == ["bf16"], "which is what it begins with"
        self.orders.clear()
        self.told.clear()

    def active_plan(self, model: str, version: int) -> ActivePlan | None:
        return self.serves if (model, version) == ("m", 1) else None

    def order(self, order: PrecisionOrder) -> Future[None]:
        assert (order.model, order.version) == ("m", 1)
        assert self.serves is not None
        assert order.plan == self.serves.plan
        assert PrecisionOrder.from_json(order.to_json()) == order
        self.orders.append((order.precision, order.reason))
        self.told.append(Future())
        return self.told[-1]

    def transition(self, model: str, version: int, to: Precision) -> None:
        self.transitions.append(to)

    def receive(self, *verdicts: DriftVerdict) -> list[Precision]:
        """Return the precisions ordered because of ``verdicts``."""
        before = len(self.orders)
        for verdict in verdicts:
            self.owner.receive(verdict)
        return [precision for precision, _ in self.orders[before:]]


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_fp32_serves_after_a_breach_and_bf16_after_a_clean_time(rig: Rig) -> None:
    assert rig.receive(WITHIN, OVER, OVER) == ["fp32"]
    assert (rig.transitions, rig.restarts) == ([], [])
    rig.told[0].set_result(None)
    assert (rig.transitions, rig.restarts) == (["fp32"], [("m", 1)])
    assert rig.receive(WITHIN) == [], "the minimum stay"
    rig.now = 11.0
    assert rig.receive(OVER, WITHIN) == []
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
    assert f"fp32 cannot answer: {public}" in rig.orders[-1][1]
    assert (rig.transitions, rig.restarts) == ([], [])
    rig.now = 4.9
    assert rig.receive(OVER) == []
    rig.now = 5.0
    assert rig.receive(OVER) == ["fp32"]


def test_a_replacement_starts_with_a_new_state(rig: Rig) -> None:
    rig.receive(OVER)
    rig.told[0].set_result(None)
    rig.serves = ActivePlan("another", 200.0, FP32)
    within, over = WITHIN.with_plan("another"), OVER.with_plan("another")
    assert rig.receive(over) == ["bf16"], "measured before it was loaded"
    assert rig.receive(replace(within, at=300.0)) == []
    assert rig.receive(replace(over, at=300.0)) == ["fp32"]


def test_late_verdicts_on_a_replaced_generation_are_ignored(rig: Rig) -> None:
    rig.receive(OVER)
    rig.told[0].set_result(None)
    rig.serves = ActivePlan("another", 200.0, FP32)
    late = replace(OVER, at=200.1)
    assert rig.receive(late, late) == ["bf16"]
    assert rig.receive(late.with_plan("another")) == ["fp32"]


def test_a_generation_loaded_by_the_same_plan_starts_with_a_new_state_too(rig: Rig) -> None:
    rig.receive(OVER)
    rig.told[0].set_result(None)
    rig.serves = ActivePlan("plan", 60.0, FP32)
    assert rig.receive(OVER) == ["bf16", "fp32"]


def test_an_old_order_of_fp32_for_the_same_plan_is_replaced_by_bf16(rig: Rig) -> None:
    """A generation loaded by that plan again carries the old order out, here after another plan has served."""
    rig.receive(OVER)
    rig.told[0].set_result(None)
    rig.serves = ActivePlan("another", 200.0, FP32)
    assert rig.receive(replace(WITHIN, at=201.0).with_plan("another")) == ["bf16"]
    rig.serves = ActivePlan("plan", 300.0, FP32)
    assert rig.receive(replace(WITHIN, at=301.0), replace(WITHIN, at=302.0)) == ["bf16"]
    assert rig.orders[-1] == ("bf16", "")


def test_a_replacement_is_ordered_to_serve_bf16_without_a_verdict(rig: Rig) -> None:
    """The replacement may never be sampled."""
    rig.receive(OVER)
    rig.told[0].set_result(None)
    rig.serves = ActivePlan("plan", 60.0, FP32)
    rig.owner.maintain()
    assert [precision for precision, _ in rig.orders] == ["fp32", "bf16"]
    rig.owner.maintain()
    assert len(rig.orders) == 2, "once"


def test_the_same_generation_gets_no_second_order_while_fp32_is_loaded_or_serves(rig: Rig) -> None:
    assert rig.receive(OVER) == ["fp32"]
    assert rig.receive(OVER, WITHIN) == []
    rig.told[0].set_result(None)
    assert rig.receive(WITHIN, OVER) == []


def test_a_reference_loaded_for_a_replaced_generation_is_not_a_transition(rig: Rig) -> None:
    rig.receive(OVER)
    rig.serves = ActivePlan("another", 90.0, FP32)
    rig.receive(WITHIN)
    rig.told[0].set_result(None)
    assert rig.transitions == []


def test_verdicts_on_a_model_that_is_not_served_are_ignored(rig: Rig) -> None:
    rig.serves = None
    assert rig.receive(OVER, replace(OVER, model="other")) == []


def test_an_alert_is_logged_once_and_its_reason_is_sent_to_the_processes(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(FallbackPolicy(policy="alert"))
    with caplog.at_level(logging.INFO):
        assert rig.receive(OVER, OVER, WITHIN) == ["bf16", "bf16"]
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"]
    assert "model 'm' version 1 is over its drift budget: relative_l2 of output 'y' is 1.5 times" in caplog.text
    assert rig.orders[0][1].startswith("relative_l2 of output 'y'")
    assert rig.orders[1] == ("bf16", "")


def test_off_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(FallbackPolicy(policy="off"))
    assert rig.receive(OVER, WITHIN) == []
    assert caplog.text == ""


def test_the_order_of_fp32_is_repeated_while_fp32_should_serve(rig: Rig) -> None:
    """A restarted process may have failed to load the reference when no caller waited for its response."""
    rig.receive(OVER)
    rig.told[0].set_result(None)
    rig.now = 4.0
    rig.owner.maintain()
    assert len(rig.orders) == 1
    rig.now = 5.0
    rig.owner.maintain()
    rig.owner.maintain()
    assert [precision for precision, _ in rig.orders] == ["fp32", "fp32"]
    assert rig.transitions == ["fp32"]
    rig.now = 20.0
    rig.receive(WITHIN)
    rig.now = 30.0
    rig.owner.maintain()
    assert [precision for precision, _ in rig.orders] == ["fp32", "fp32", "bf16"]
