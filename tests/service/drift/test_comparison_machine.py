"""Any order of samples, restarts and profiles of a model of two outputs, against tests/support/driftmodel.py.

After every request the verdict is the model's, and every counter of the metrics is what the model has counted, so none
ever falls. It found these planted faults: the alarm ends as soon as the sum is below the threshold; a breach ends with
the wide interval; requests out of range count with the others; each row counts as a request; an overflow in fp32
begins another profile.
"""

import math
from collections import Counter
from collections.abc import Mapping

import numpy as np
import pytest
from driftmetrics import DriftMetrics
from driftmodel import Output, Request, Row, usual
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from machinesettings import machine_settings

from bf16kit.drift.measurements import InputRange
from bf16kit.drift.metrics import Budget
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.service.drift.comparison import Comparison
from bf16kit.service.drift.contract import DriftVerdict
from bf16kit.service.drift.detector import Calibration
from bf16kit.service.drift.sampler import Sample

SPECS = (TensorSpec("y", "float32", ("batch", 2), "embedding"), TensorSpec("z", "float32", ("batch", 2), "logits"))
RANGES = {"x": InputRange(low=-1.0, high=1.0)}
REFERENCE = np.array([1.01, 1.0])  # of a row: the second element is the largest after a drift of 0.007 in it
NORM = float(np.linalg.norm(REFERENCE))


def spread(count: int, centre: float, width: float, first: int = 0) -> list[float]:
    """Return ``count`` different drifts around ``centre``, evenly spaced in their logarithms but not ordered."""
    return [centre * math.exp(width * (((first + at) * 0.6180339887) % 1 - 0.5)) for at in range(count)]


MEASURED = {"narrow": spread(60, 4e-3, 0.3), "wide": spread(17, 4e-3, 4.0), "exact": [0.0] * 40}
CALIBRATIONS: Mapping[str, dict[str, list[float]]] = {
    "cpu": {"y": MEASURED["narrow"], "z": MEASURED["wide"]},
    "cuda": {"y": MEASURED["exact"], "z": MEASURED["narrow"][:15]},  # too few: it is learnt
}
BUDGETS = st.sampled_from(
    [
        {"relative_l2": 1e-2, "nonfinite": 0.0},
        {"relative_l2": 5e-3, "relative_l2.p50": 8e-3, "top1_agreement": 0.9},
        {"relative_l2.p99": 2e-2, "max_abs": 0.1},
        {"relative_l2": 1e-1, "relative_l2.worst": 3.0, "top1_agreement": 0.6, "max_abs": 7.0},
        {"nonfinite": 0.0},
    ]
)
DRIFTS = st.sampled_from([4e-3, 4e-3, 6.5e-3, 1.3e-2, 0.12, 2.1, 0.0, 1e-7, math.inf])
COUNTED = ("changes_total", "nonfinite_total", "max_abs_count")  # the last is the number of rows
PROFILES = st.sampled_from(["cpu", "cuda"])
CLIENTS = st.sampled_from(["a", "b", "ab", "aaab", "abcdef"])  # they send in turn


class LiveDrift(RuleBasedStateMachine):
    times = 1  # as many requests in a step

    @initialize(budget=BUDGETS, profile=st.sampled_from(["cpu", "cpu", "cuda"]))
    def start(self, budget: dict[str, float], profile: str) -> None:
        self.budget, self.profile, self.now, self.sent = budget, profile, 1e9, 0
        self.metrics = DriftMetrics(*SPECS)
        self.comparison = Comparison(
            SPECS,
            0,
            Budget.from_dict(budget),
            model="m",
            version=2,
            calibration=Calibration(CALIBRATIONS, RANGES),
            clock=lambda: self.now,
        )
        self.counted = Counter[str]()
        self.samples, self.at = 0, 0.0
        self.outputs: dict[str, Output] = {}
        self.begun = ""  # the profile of the newest sample

    @rule(count=st.sampled_from([9, 14]), drift=DRIFTS, clients=CLIENTS, asked=st.sampled_from(["yz", "y", "z"]))
    def send_alike(self, count: int, drift: float, clients: str, asked: str) -> None:
        for each in spread(count * self.times, drift, 0.4, self.sent):
            self._observe([each], asked, clients)

    @rule(
        count=st.sampled_from([1, 2, 9]),
        rows=st.sampled_from([1, 3, 8, 40]),
        drift=DRIFTS,
        odd=DRIFTS,
        asked=st.sampled_from(["yz", "y", "z"]),
        clients=CLIENTS,
        probability=st.sampled_from([1.0, 0.2, 0.01]),
        scale=st.sampled_from([1.0, 30.0]),
        out=st.booleans(),
    )
    def send_odd(
        self,
        count: int,
        rows: int,
        drift: float,
        odd: float,
        asked: str,
        clients: str,
        probability: float,
        scale: float,
        out: bool,
    ) -> None:
        """Every third request has ``odd`` drift. Rows beyond the eighth are alike."""
        for number in range(count * self.times):
            few, times = (1, rows) if rows > 8 else (rows, 1)
            drifts = spread(few, odd if number % 3 == 2 else drift, 0.4, self.sent) * times
            self._observe(drifts, asked, clients, probability, scale, out=out)

    def _observe(
        self,
        drifts: list[float],
        asked: str,
        clients: str,
        probability: float = 1.0,
        scale: float = 1.0,
        *,
        out: bool = False,
    ) -> None:
        """Send a request of the next of ``clients`` and judge it."""
        self._begin()
        self.sent += 1
        self.now += self.sent % 4
        reference = np.tile(REFERENCE * scale, (len(drifts), 1))
        answers, element = reference.copy(), self.sent % 3 // 2
        answers[:, element] += np.array(drifts) * NORM * scale
        made = tuple(
            Row(each, each * NORM * scale, int(each == math.inf), element == 0 or not 0.01 < each * NORM < math.inf)
            for each in drifts
        )
        x = np.full((len(drifts), 3), 5.0 if out else 0.5, np.float32)
        request = Request(made, 1 / probability, clients[self.sent % len(clients)])
        sample = Sample(
            {"x": x}, dict.fromkeys(asked, answers), len(made), 64, probability, "bf16", self.profile, request.client
        )
        found = self.comparison.observe({"y": reference, "z": reference}, sample, self.metrics.model)
        assert found is not None
        assert set(found) == (set() if out else set(asked))
        self._count(asked, request, out=out)
        self.samples, self.at = self.samples + len(made), self.now
        self.same_verdict()

    def _count(self, asked: str, request: Request, *, out: bool) -> None:
        self.counted["out"] += len(request.rows) * out
        for name in asked:
            output, before = self.outputs[name], self.outputs[name].changes
            if out:
                output.add_apart(request)
            else:
                output.add(request)
            self.counted[f"changes_total {name}"] += output.changes - before
            self.counted[f"max_abs_count {name}"] += round(request.total)
            self.counted[f"nonfinite_total {name}"] += sum(row.nonfinite for row in request.rows)

    def _begin(self) -> None:
        """Another profile answers: other drift is expected of it."""
        if self.begun != self.profile:
            self.outputs = {
                name: Output(self.budget, 2, name == "z", usual(tuple(rows), 2))
                for name, rows in CALIBRATIONS[self.profile].items()
            }
            self.samples, self.begun = 0, self.profile

    @rule(
        value=st.sampled_from([math.inf, -math.inf, math.nan]),
        rows=st.sampled_from([1, 3]),
        odd=DRIFTS,
        profile=PROFILES,
    )
    def overflow_in_fp32(self, value: float, rows: int, odd: float, profile: str) -> None:
        """Send a request that fp32 cannot answer either: it is counted, and nothing else changes."""
        reference = np.tile(REFERENCE, (rows, 1))
        reference[-1, 1] = value
        x = np.full((rows, 3), 0.5, np.float32)
        sample = Sample({"x": x}, {"z": np.full((rows, 2), odd)}, rows, 64, 1.0, "bf16", profile)
        assert self.comparison.observe({"y": reference, "z": reference}, sample, self.metrics.model) is None
        self.counted["reference"] += rows

    @rule(profile=st.sampled_from(["", "", "cpu", "cuda"]))
    def begin_anew(self, profile: str) -> None:
        """Another precision or profile answers: all is forgotten but the expected drift, and what is learnt of it."""
        self.scrape()
        self.profile = profile or self.profile
        if not profile:
            self.comparison.restart()
            for output in self.outputs.values():
                output.restart()
            self.samples, self.at = 0, 0.0

    def scrape(self) -> None:
        found = self.metrics.values("output", "reference_nonfinite_total", *COUNTED)
        assert found.pop(("reference_nonfinite_total", "")) == self.counted["reference"]
        assert found == {(name, of): pytest.approx(self.counted[f"{name} {of}"]) for name in COUNTED for of in "yz"}
        if self.sent:
            assert self.metrics.value("out_of_range_total", input="x") == self.counted["out"]

    @invariant()
    def same_verdict(self) -> None:
        found = self.comparison.verdict()
        bounds = [(name, each) for name, output in self.outputs.items() for each in output.found]
        over = [(name, each) for name, each in bounds if each.bound in self.outputs[name].over]
        undecided = [(name, each) for name, each in bounds if not each.within]
        assert found.state == ("over" if over else "unknown" if undecided or not bounds else "within")
        assert found.cause == self._cause()
        assert found.changed == any(output.alarm for output in self.outputs.values())
        assert (found.model, found.version, found.samples, found.at) == ("m", 2, self.samples, self.at)
        candidates = over or undecided or [pair for pair in bounds if pair[1].can_confirm] or bounds
        if not candidates:
            assert found == DriftVerdict("m", 2, cause=found.cause, samples=self.samples, at=self.at)
            return
        name, bound = next(pair for pair in candidates if (pair[0], pair[1].bound) == (found.output, found.metric))
        assert bound.ratio == pytest.approx(max(each.ratio for _, each in candidates))
        assert (found.ratio, found.low, found.high) == pytest.approx((bound.ratio, bound.low, bound.high), rel=1e-6)
        assert found.effective_samples == pytest.approx(self.outputs[name].size)

    def _cause(self) -> str:
        causes = {output.cause for output in self.outputs.values()}
        apart = {"out_of_range"} if any(output.apart_is_over for output in self.outputs.values()) else set()
        return next(
            cause for cause in ("broken", "rounding", "out_of_range", "none") if cause in causes | apart | {"none"}
        )

    def teardown(self) -> None:
        if hasattr(self, "metrics"):
            self.scrape()


class LongLiveDrift(LiveDrift):
    times = 5


def test_the_verdict_follows_the_model_in_any_order() -> None:
    run_state_machine_as_test(LiveDrift, settings=machine_settings(0.25, 12))


@pytest.mark.long
def test_the_verdict_follows_the_model_in_many_orders() -> None:
    run_state_machine_as_test(LongLiveDrift, settings=machine_settings(1.0, in_ci=0.1))
