"""What operators read of a fallback, and that a model on the border does not flap; the machine has all else."""

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
from bf16kit.service.drift import fallbackcontroller
from bf16kit.service.drift.contract import DriftVerdict, FallbackPolicy, State
from bf16kit.service.drift.estimates import estimates
from bf16kit.service.drift.fallbackcontroller import ActivePlan, Fallback, FallbackController, PrecisionOrder, describe
from bf16kit.service.drift.gate import breach_verdict
from bf16kit.service.drift.recent import RecentRows
from bf16kit.service.request import Precision

WITHIN = DriftVerdict("m", 1, "within", "none", "y", "relative_l2", 0.5, 0.4, 0.6, 300.0, 400, False, 100.0, "plan")
OVER = replace(WITHIN, state="over", cause="rounding", ratio=1.5, low=1.2, high=1.8)
UNKNOWN = replace(WITHIN, state="unknown", ratio=1.0, low=0.8, high=1.2)
FP32 = FallbackPolicy(policy="fp32", min_stay_seconds=10)


def test_the_description_of_a_breach_has_its_bound_its_size_and_its_cause() -> None:
    said = describe(replace(OVER, cause="broken"))
    assert said.startswith(
        "relative_l2 of output 'y' is 1.5 times its budget (95 %: 1.2 to 1.8, 300 effective samples)"
    )
    assert said.endswith("something is broken")
    assert describe(replace(OVER, cause="none")).endswith("samples)")
    assert describe(breach_verdict("m", 1, [], Budget({}), 1, 1.0)) == "the golden samples can no longer be run"


# --- a model on the border of its budget ------------------------------------------------------------------------------
# Flapping means more than two changes of the precision in a day. At one sample a second, 100,000 samples are 28 hours.

SAMPLES = 100_000
EVERY = 10  # samples between two verdicts: recent drift has a half-life of hundreds, so hardly anything is missed
BUDGET = Budget.from_dict({"relative_l2": 0.015})
SPREAD = 0.5  # of log drift between requests
HASTY = FallbackPolicy(policy="fp32", min_stay_seconds=0, clean_samples=1)  # and judged by the narrow interval


def verdict_of(recent: RecentRows, second: float, *, hasty: bool) -> DriftVerdict:
    """Return the verdict of a ``Comparison`` on one bound; ``hasty``: by the 95 %."""
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


# --- orders and the log -----------------------------------------------------------------------------------------------


class Rig:
    """Serving processes that carry out an order at once, or fail with ``error``, and a clock that the test sets."""

    def __init__(self, policy: FallbackPolicy = FP32, error: Exception | None = None) -> None:
        self.now = 0.0
        self.error = error
        self.active = ActivePlan("plan", 50.0, policy)
        self.orders: list[tuple[Precision, str]] = []
        self.transitions: list[Precision] = []
        self.controller = FallbackController(self, lambda *key: None, clock=lambda: self.now)
        self.receive(UNKNOWN)
        assert self.orders.pop() == ("bf16", ""), "which is what it begins with"

    def active_plan(self, model: str, version: int) -> ActivePlan:
        return self.active

    def order(self, order: PrecisionOrder) -> Future[None]:
        self.orders.append((order.precision, order.reason))
        done: Future[None] = Future()
        if self.error is None or order.precision == "bf16":
            done.set_result(None)
        else:
            done.set_exception(self.error)
        return done

    def transition(self, model: str, version: int, to: Precision) -> None:
        self.transitions.append(to)

    def receive(self, *verdicts: DriftVerdict) -> None:
        for verdict in verdicts:
            self.controller.receive(verdict)


def test_each_change_of_precision_is_ordered_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.receive(OVER)
    rig.now = 10.0
    rig.receive(WITHIN)
    assert rig.orders == [("fp32", describe(OVER)), ("bf16", "")]
    assert rig.transitions == ["fp32", "bf16"]
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING", "WARNING"]
    assert "model 'm' version 1: fp32 answers: relative_l2 of output 'y'" in caplog.text
    assert "model 'm' version 1: bf16 answers again" in caplog.text


@pytest.mark.parametrize(
    ("error", "public"), [(ArtifactError("no residual"), "no residual"), (RuntimeFailure("0xbad"), "the server's log")]
)
def test_if_fp32_cannot_be_loaded_the_reason_says_so_and_the_log_has_the_error(
    error: Exception, public: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(error=error)
    rig.receive(OVER)
    assert str(error) in caplog.text
    assert [precision for precision, _ in rig.orders] == ["fp32", "bf16"]
    assert rig.orders[-1][1].startswith(f"{describe(OVER)}; fp32 cannot answer: {public}")
    assert rig.transitions == []


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
