"""Any order of verdicts, reloads, waiting and answers to orders, for two models, against docs/operations.md's rules.

After every step the order in force, and the numbers of changes of precision and of measurements begun anew, are the
model's. It found these planted faults: the stay does not double, counts from the fallback, or stays long after a day;
a return asks neither for the alarm nor the margin; a reload keeps fp32; older verdicts count; no measurement begins
anew on a return; a failure is followed by another order at once.
"""

from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from machinesettings import machine_settings

from bf16kit.drift.metrics import Breach, Budget
from bf16kit.messages.errors import ArtifactError
from bf16kit.service.drift.contract import DriftVerdict, FallbackPolicy
from bf16kit.service.drift.fallbackcontroller import ActivePlan, FallbackController, PrecisionOrder
from bf16kit.service.drift.gate import breach_verdict
from bf16kit.service.request import Precision

DAY, MINUTE, START = 86_400.0, 60.0, 1_000.0
MODELS = st.sampled_from(["m", "m", "m", "n"])
SAMPLES = 100  # clean ones, to return
POLICIES = st.sampled_from(
    [
        *[FallbackPolicy(policy="fp32", min_stay_seconds=300, clean_samples=SAMPLES)] * 3,
        FallbackPolicy(policy="fp32", min_stay_seconds=DAY / 3, clean_samples=SAMPLES),
        FallbackPolicy(policy="alert"),
        FallbackPolicy(policy="off"),
    ]
)
CLEAN = DriftVerdict("m", 1, "within", "none", "y", "relative_l2", 0.5, 0.4, 0.6, 300.0, 400, False, START, "p")
OVER = replace(CLEAN, state="over", cause="rounding", ratio=1.5, low=1.2, high=1.8)
UNCLEAN = [
    replace(CLEAN, state="unknown", high=1.2),
    replace(CLEAN, high=0.95),
    replace(CLEAN, changed=True),
    replace(CLEAN, effective_samples=SAMPLES - 1.0),
]
VERDICTS = st.sampled_from([OVER, CLEAN, *UNCLEAN])
LATE = st.sampled_from([-1.0, 0.0, 1.0, DAY])
BUDGET = Budget.from_dict({"relative_l2": 0.01})


@dataclass
class Version:
    """The model of what is decided of one loaded version."""

    active: ActivePlan
    heard: bool = False  # a verdict on it has come
    phase: str = "bf16"
    is_told: bool = False  # operators know of a breach
    stays: int = 0  # in fp32, in a row
    since: float = 0.0  # when the phase began
    over_at: float = 0.0
    retry_at: float = 0.0
    ordered_at: float = 0.0
    pending: list[Future[None]] = field(default_factory=list)

    @property
    def policy(self) -> FallbackPolicy:
        return self.active.policy

    @property
    def stay(self) -> float:
        return min(DAY, self.policy.min_stay_seconds * 2.0 ** (self.stays - 1))


class Precisions(RuleBasedStateMachine):
    @initialize(second=POLICIES)
    def start(self, second: FallbackPolicy) -> None:
        self.now = 0.0
        self.loads = 0
        self.late: list[tuple[str, Future[None]]] = []  # answers to orders for versions that were replaced
        self.served: dict[str, Version] = {}
        self.orders: dict[str, PrecisionOrder] = {}
        self.answers: dict[str, Future[None]] = {}  # to the newest order of each
        self.sent = Counter[str]()
        self.transitions, self.expected = Counter[tuple[str, Precision]](), Counter[tuple[str, Precision]]()
        self.restarts = Counter[str]()
        self.controller = FallbackController(self, self._restart, clock=lambda: self.now)
        self._load("m", FallbackPolicy(policy="fp32", min_stay_seconds=300, clean_samples=SAMPLES))
        self._load("n", second)

    # --- the serving processes ---------------------------------------------------------------------------------------

    def active_plan(self, model: str, version: int) -> ActivePlan | None:
        assert version == 1
        return self.served[model].active if model in self.served else None

    def order(self, order: PrecisionOrder) -> Future[None]:
        self.orders[order.model] = order
        self.sent[order.model] += 1
        self.answers[order.model] = Future()
        return self.answers[order.model]

    def transition(self, model: str, version: int, to: Precision) -> None:
        self.transitions[model, to] += 1

    def _restart(self, model: str, version: int) -> None:
        self.restarts[model] += 1

    def _load(self, model: str, policy: FallbackPolicy) -> None:
        self.loads += 1
        self.served[model] = Version(ActivePlan(f"p{self.loads % 2}", START + self.now, policy), since=self.now)

    # --- what happens ------------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([1.0, 59.0, 60.0, 299.0, 300.0, 600.0, DAY / 3, DAY]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(model=MODELS, policy=POLICIES, is_gone=st.booleans(), falls=st.sampled_from(["no", "yes", "late"]))
    def reload(self, model: str, policy: FallbackPolicy, is_gone: bool, falls: str) -> None:
        """Load another artifact or another serving.yaml in its place, or unload it; it ``falls`` back before."""
        if falls != "no":
            self.breach(model, by_gate=False, works=True if falls == "yes" else None)
        self.now += 1
        self.late += [(model, future) for future in self.served[model].pending] if model in self.served else []
        self.served.pop(model, None)
        if not is_gone:
            self._load(model, policy)

    @precondition(lambda self: self.late)
    @rule()
    def answer_late(self) -> None:
        """The processes have loaded the reference of a version that was replaced: nothing follows from it."""
        known = [model for model, version in self.served.items() if version.heard]
        for model, future in self.late:
            if model in known:
                future.set_result(None)
        self.late = [(model, future) for model, future in self.late if model not in known]

    @rule(model=MODELS)
    def unload(self, model: str) -> None:
        self.served.pop(model, None)

    @rule(model=MODELS, by_gate=st.booleans(), works=st.sampled_from([True, True, False, None]))
    def breach(self, model: str, by_gate: bool, works: bool | None) -> None:
        """The order that may follow is answered at once, or later if ``works`` is None."""
        found = [Breach("y", "relative_l2", 0.05, 0.01)]
        self._receive(model, breach_verdict(model, 1, found, BUDGET, 8, START) if by_gate else OVER)
        if works is not None:
            self._answer(model, works)

    @rule(model=MODELS)
    def clean(self, model: str) -> None:
        self._receive(model, CLEAN)

    @rule(model=MODELS, verdict=VERDICTS, late=LATE)
    def end_of_stay(self, model: str, verdict: DriftVerdict, late: float) -> None:
        """Wait until a second before the earliest return to bf16, or later."""
        version = self.served.get(model)
        if version is not None and version.phase == "fp32":
            self.now = max(self.now, version.over_at + version.stay + late)
        self._receive(model, verdict)
        self.the_order_in_force_is_the_models()

    @rule(model=MODELS, times=st.integers(1, 4), verdict=VERDICTS, apart=st.sampled_from([1.0, MINUTE, DAY]))
    def come_and_go(self, model: str, times: int, verdict: DriftVerdict, apart: float) -> None:
        """Fall back, hear ``verdict`` at the end of the stay, and return after it or a second stay."""
        for _ in range(times):
            self.breach(model, by_gate=False, works=True)
            self.end_of_stay(model, CLEAN, -1.0)
            self.end_of_stay(model, verdict, 0.0)
            self.end_of_stay(model, CLEAN, 0.0)
            self.now += apart

    @rule(model=MODELS, verdict=st.sampled_from(UNCLEAN))
    def doubtful(self, model: str, verdict: DriftVerdict) -> None:
        self._receive(model, verdict)

    @rule(model=MODELS, verdict=st.sampled_from([OVER, CLEAN]), older=st.booleans())
    def stale(self, model: str, verdict: DriftVerdict, older: bool) -> None:
        """A verdict comes on another plan, or was measured before this version was loaded: nothing follows from it."""
        active = self.active_plan(model, 1)
        plan, at = ("another", START + self.now) if active is None or not older else (active.plan, active.since - 0.5)
        self.controller.receive(replace(verdict, model=model, plan=plan, at=at))
        if model in self.served:
            self.served[model].heard = True

    def _receive(self, model: str, verdict: DriftVerdict) -> None:
        active = self.active_plan(model, 1)
        plan = "p0" if active is None else active.plan
        before = self.sent[model]
        self.controller.receive(replace(verdict, model=model, plan=plan, at=START + self.now))
        if model not in self.served:
            assert self.sent[model] == before
            return
        version = self.served[model]
        version.heard = True
        if version.phase == "fp32":
            self._maybe_return(model, version, verdict)
        elif version.phase == "bf16" and verdict.state == "over" and version.policy.policy != "off":
            version.is_told = True
            if version.policy.policy == "fp32" and self.now >= version.retry_at:
                version.phase, version.ordered_at = "warming", self.now
                version.pending.append(self.answers[model])
        elif version.phase == "bf16" and verdict.state == "within":
            version.is_told = False

    def _maybe_return(self, model: str, version: Version, verdict: DriftVerdict) -> None:
        if verdict.state == "over":
            version.over_at = self.now
        elif verdict == CLEAN and self.now >= version.over_at + version.stay:
            version.phase, version.since, version.is_told = "bf16", self.now, False
            self.expected[model, "bf16"] += 1

    @rule(model=MODELS, works=st.booleans())
    def answer(self, model: str, works: bool) -> None:
        self._answer(model, works)

    def _answer(self, model: str, works: bool) -> None:
        """The processes have loaded the reference, if they should, or cannot."""
        version = self.served.get(model)
        if version is None or version.phase != "warming":
            return
        if works:
            version.stays = 1 if self.now - version.since >= DAY else version.stays + 1
            version.phase, version.since, version.over_at = "fp32", self.now, self.now
            self.expected[model, "fp32"] += 1
            version.pending.pop().set_result(None)
        else:
            version.phase, version.retry_at = "bf16", self.now + MINUTE
            version.pending.pop().set_exception(ArtifactError("no residual"))

    @rule()
    def maintain(self) -> None:
        """Repeat the order of fp32 every minute; order a version that nothing was heard of yet to begin with bf16."""
        before = self.sent.copy()
        self.controller.maintain()
        for model, version in self.served.items():
            is_due = version.phase == "fp32" and self.now - version.ordered_at >= MINUTE
            version.ordered_at = self.now if is_due else version.ordered_at
            if version.heard:
                assert self.sent[model] - before[model] == is_due
            elif self.sent[model] > before[model]:
                version.heard = True

    # --- what always holds -------------------------------------------------------------------------------------------

    @invariant()
    def the_order_in_force_is_the_models(self) -> None:
        for model, version in self.served.items():
            if version.heard:
                order = self.orders[model]
                assert order.plan == version.active.plan
                assert order.precision == ("bf16" if version.phase == "bf16" else "fp32")
                assert bool(order.reason) == version.is_told

    @invariant()
    def every_change_is_counted_and_begins_the_measurement_anew(self) -> None:
        assert self.transitions == self.expected
        for model in "mn":
            assert self.restarts[model] == self.expected[model, "fp32"] + self.expected[model, "bf16"]


def test_precisions_follow_the_model_in_any_order() -> None:
    run_state_machine_as_test(Precisions, settings=machine_settings(1.0, 30))


@pytest.mark.long
def test_precisions_follow_the_model_in_many_orders() -> None:
    run_state_machine_as_test(Precisions, settings=machine_settings(20.0, 50, in_ci=1.0))
