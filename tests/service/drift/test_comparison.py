from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from bf16kit.drift.measurements import InputRange
from bf16kit.drift.metrics import Budget, SampleDrift
from bf16kit.messages.errors import ArtifactError
from bf16kit.numerics.tensors import TensorSpec
from service.contract import Array
from service.drift.calibration import Calibration
from service.drift.comparison import Comparison
from service.drift.detector import LEARNING_ROWS
from service.drift.recent import REQUESTS
from service.drift.sampler import Sample
from service.drift.verdict import DriftVerdict

SPECS = (TensorSpec("y", "float32", ("batch", 2), "embedding"), TensorSpec("z", "float32", ("batch", 2), "logits"))
ONES = np.ones((1, 2), np.float32)
BUDGET = Budget.from_dict({"relative_l2": 1e-2, "nonfinite": 0.0})
MEASURED = tuple(float(value) for value in 4e-3 * np.exp(0.1 * np.random.default_rng(0).standard_normal(200)))
CALIBRATION = Calibration({"cpu": {"y": MEASURED}}, {"x": InputRange(low=-1.0, high=1.0)})


class Heard:
    """An observer that records what the comparison reports."""

    def __init__(self) -> None:
        self.drifts: list[tuple[str, float]] = []
        self.pooled: list[tuple[str, int, float]] = []  # output, rows, weight
        self.ratios: dict[tuple[str, str], tuple[float, float, float]] = {}
        self.slices: dict[str, tuple[int, int]] = {}
        self.effective: dict[str, float] = {}
        self.scores: list[float | None] = []
        self.alarms: list[str] = []
        self.out: dict[str, int] = {}
        self.nonfinite_references = 0
        self.said = ("", "")

    def drift(self, output: str, sample: SampleDrift, weight: float, *, scalar: bool = False) -> None:
        self.drifts.append((output, weight))

    def judged_rows(self, output: str, rows: Sequence[SampleDrift], weight: float) -> None:
        self.pooled.append((output, len(rows), weight))

    def budget_ratio(self, output: str, metric: str, ratio: float, low: float, high: float) -> None:
        self.ratios[output, metric] = ratio, low, high

    def worst_slice(self, output: str, axis: int, index: int) -> None:
        self.slices[output] = axis, index

    def recent(self, output: str, effective_samples: float, change_score: float | None) -> None:
        self.effective[output] = effective_samples
        self.scores.append(change_score)

    def changed(self, output: str) -> None:
        self.alarms.append(output)

    def out_of_range(self, name: str, rows: int) -> None:
        self.out[name] = self.out.get(name, 0) + rows

    def reference_nonfinite(self, rows: int) -> None:
        self.nonfinite_references += rows

    def judged(self, state: str, cause: str) -> None:
        self.said = state, cause


class Live:
    """Sends samples of one row and one output to a comparison, with the drift that a test sets."""

    def __init__(self, calibration: Calibration | None = CALIBRATION, budget: Budget = BUDGET) -> None:
        self.heard = Heard()
        self.comparison = Comparison(
            SPECS[:1], 0, budget, model="m", version=2, calibration=calibration, clock=lambda: 5.0
        )
        self._random = np.random.default_rng(1)

    def send(
        self,
        drift: float,
        count: int = 1,
        *,
        spread: float = 0.1,
        x: float = 0.5,
        probability: float = 1.0,
        client: str = "",
    ) -> DriftVerdict:
        for factor in np.exp(spread * self._random.standard_normal(count)):
            answered = np.array([[1.0 + drift * factor * math.sqrt(2), 1.0]], np.float64)
            sent = sample({"y": answered}, x, probability, client=client)
            self.comparison.observe({"y": np.ones((1, 2))}, sent, self.heard)
        return self.comparison.verdict()

    def until(self, drift: float, most: int, *, x: float = 0.5) -> int:
        """Send samples until an alarm. Return how many it took."""
        for count in range(1, most + 1):
            if self.send(drift, x=x).changed:
                return count
        raise AssertionError(f"no alarm within {most} samples")


def sample(
    outputs: dict[str, Array], x: float = 0.5, probability: float = 1.0, profile: str = "cpu", client: str = ""
) -> Sample:
    rows = len(next(iter(outputs.values())))
    return Sample({"x": np.full((rows, 3), x, np.float32)}, outputs, rows, 64, probability, "bf16", profile, client)


class Ranker:
    """Sends samples of one score each to a comparison that knows the errors of 64 calibrated scores."""

    def __init__(self) -> None:
        self.heard = Heard()
        self._random = np.random.default_rng(2)
        errors = tuple(0.002 * np.abs(self._random.standard_normal(64)))
        known = Calibration({"cpu": {"score": errors}}, scalars=frozenset({"score"}))
        spec = TensorSpec("score", "float32", ("batch", 1))
        self._comparison = Comparison([spec], 0, Budget(), calibration=known)

    def send(self, count: int, *, error: float = 0.002, spread: float = 1.0) -> DriftVerdict:
        for score, wrong in zip(*self._random.standard_normal((2, count)), strict=True):
            expected = np.full((1, 1), spread * score)
            self._comparison.observe({"score": expected}, sample({"score": expected + error * wrong}), self.heard)
        return self._comparison.verdict()


def test_scores_near_0_are_no_drift_of_a_ranker() -> None:
    """Their relative errors are large, and their cosine distance is 0 or 2."""
    ranker = Ranker()
    assert ranker.send(200).state == "within"
    found = ranker.send(600, spread=0.01)
    assert (found.state, found.cause, found.changed, ranker.heard.alarms) == ("within", "none", False, [])
    assert {metric for _, metric in ranker.heard.ratios} == {"nonfinite", "slice_error"}


def test_a_damaged_ranker_is_over_its_budget_and_broken() -> None:
    ranker = Ranker()
    ranker.send(200)
    found = ranker.send(100, error=1.0)
    assert (found.state, found.metric, found.cause) == ("over", "slice_error", "broken")
    assert ranker.heard.alarms == ["score"]


def test_an_output_that_was_not_requested_is_skipped() -> None:
    heard = Heard()
    Comparison(SPECS, 0, Budget()).observe({"y": ONES, "z": ONES}, sample({"z": ONES}), heard)
    assert heard.drifts == [("z", 1.0)]


def test_a_row_counts_for_all_rows_that_it_was_chosen_from() -> None:
    live = Live()
    live.send(4e-3, probability=0.01)
    assert live.heard.drifts == [("y", 100.0)]
    assert live.heard.pooled == [("y", 1, 100.0)]


def test_the_mean_is_that_of_all_rows_served_and_not_of_the_sampled_rows() -> None:
    live = Live(budget=Budget.from_dict({"relative_l2": 1.0}))
    for _ in range(50):
        live.send(0.1, spread=0, probability=0.01)
        live.send(0.9, spread=0, probability=1.0)
    ratio, low, high = live.heard.ratios["y", "relative_l2"]
    assert ratio == pytest.approx((100 * 0.1 + 0.9) / 101, rel=0.02)
    assert low < ratio < high


def test_by_default_rows_far_off_that_the_mean_does_not_show_are_over_the_budget() -> None:
    """Every thirtieth row has ten times the bound on the mean, which is met."""
    live = Live(budget=Budget())
    for _ in range(30):
        live.send(3.75e-3, 29)
        verdict = live.send(0.15)
    assert (verdict.state, verdict.metric) == ("over", "relative_l2.p99")
    assert live.heard.ratios["y", "relative_l2"][2] < 1


def test_a_tail_that_no_such_samples_could_confirm_counts_by_its_estimate() -> None:
    live = Live(budget=Budget())
    early = live.send(3.75e-3, 60)
    assert (early.state, early.metric) == ("within", "relative_l2")
    assert live.heard.ratios["y", "relative_l2.p99"][2] == math.inf
    assert live.send(0.15, 2).state == "unknown"  # of 62 rows: the estimate is over the bound
    assert live.send(3.75e-3, 1200).state == "within"
    assert live.heard.ratios["y", "relative_l2.p99"][2] <= 1


def test_requests_of_very_different_sizes_are_within_the_default_budget() -> None:
    """One request of 16 rows in ten makes the samples worth 260 at most, too few to confirm a p99."""
    live, random = Live(budget=Budget()), np.random.default_rng(1)
    for _ in range(400):
        verdict = live.send(3.75e-3, probability=1.0 if random.uniform() < 0.9 else 1 / 16)
    assert verdict.effective_samples < 300
    assert verdict.state == "within"


def test_an_old_breach_is_forgotten() -> None:
    live = Live()
    live.send(1.0)
    assert live.heard.ratios["y", "relative_l2"][0] == pytest.approx(100, rel=0.5)
    live.send(0.0, REQUESTS)
    assert live.heard.ratios["y", "relative_l2"][0] == 0


def test_only_logits_have_a_ratio_of_agreement() -> None:
    heard = Heard()
    Comparison(SPECS, 0, Budget()).observe({"y": ONES, "z": ONES}, sample({"y": ONES, "z": ONES}), heard)
    assert {output for output, metric in heard.ratios if metric == "top1_agreement"} == {"z"}


def test_the_state_is_unknown_until_there_are_enough_samples() -> None:
    live = Live()
    assert live.comparison.verdict() == DriftVerdict.unknown("m", 2)
    few = live.send(4e-3, 7)
    assert (few.state, few.cause, few.high, few.samples, few.at) == ("unknown", "none", math.inf, 7, 5.0)
    many = live.send(4e-3, 93)
    assert (many.state, many.cause, many.changed) == ("within", "none", False)
    assert (many.output, many.metric) == ("y", "relative_l2")
    assert 0.35 < many.low < many.ratio < many.high < 0.45
    assert many.effective_samples == pytest.approx(live.heard.effective["y"])
    assert live.heard.said == ("within", "none")


def test_a_model_on_the_border_is_neither_within_nor_over() -> None:
    live = Live(calibration=None)
    found = live.send(1.01e-2, 100)
    assert found.low < 1 < found.ratio < found.high
    assert (found.state, found.cause) == ("unknown", "none")


def test_a_verdict_names_a_bound_that_has_its_state() -> None:
    comparison, heard = Comparison(SPECS, 0, Budget.from_dict({"relative_l2": 3e-3})), Heard()
    far = np.array([[1.5, 1.0]], np.float32)
    for _ in range(3):
        comparison.observe({"z": ONES}, sample({"z": far}), heard)
    for _ in range(20):
        comparison.observe({"y": ONES}, sample({"y": ONES * np.float32(1.006)}), heard)
    found = comparison.verdict()
    assert heard.ratios["z", "relative_l2"][0] > found.ratio == pytest.approx(2, rel=0.01)
    assert (found.state, found.output) == ("over", "y")  # z has too few samples for that state


def test_an_output_without_rows_belongs_to_the_inputs_of_all_rows() -> None:
    spec = TensorSpec("y", "float32", (2,), "other")
    comparison, heard = Comparison([spec], 1, BUDGET, calibration=CALIBRATION), Heard()
    feeds = {"x": np.array([[0.0, 99.0]], np.float32)}
    y = np.ones(2, np.float32)
    for _ in range(20):
        comparison.observe({"y": y}, Sample(feeds, {"y": y * 2}, 2, 64, 1.0, "", "cpu"), heard)
    assert (len(heard.drifts), heard.out) == (20, {"x": 20})
    assert comparison.verdict().cause == "out_of_range"


def test_expected_drift_that_is_over_budget_is_rounding() -> None:
    live = Live(budget=Budget.from_dict({"relative_l2": 3e-3}))
    found = live.send(4e-3, 50)
    assert (found.state, found.cause, found.changed) == ("over", "rounding", False)
    assert found.low > 1
    assert live.heard.said == ("over", "rounding")


def test_a_doubling_within_budget_is_a_change_and_rounding() -> None:
    live = Live()
    live.send(4e-3, 300)
    assert live.heard.alarms == []
    assert live.until(8e-3, 200) <= 25
    found = live.comparison.verdict()
    assert (found.state, found.cause) == ("within", "rounding")
    assert live.heard.alarms == ["y"]
    live.send(8e-3, 50)
    assert live.heard.alarms == ["y"]  # one alarm for one change


def test_a_broken_model_is_distinguished_from_rounding() -> None:
    live = Live()
    live.send(4e-3, 300)
    assert live.until(0.2, 50) <= 12
    found = live.comparison.verdict()
    assert (found.state, found.cause) == ("over", "broken")


@pytest.mark.parametrize("drift", [0.2, math.inf])
def test_inputs_out_of_range_are_judged_apart_and_are_no_breach(drift: float) -> None:
    live = Live()
    live.send(4e-3, 300)
    before = live.comparison.verdict()
    live.send(drift, 50, x=1e6)
    found = live.comparison.verdict()
    assert (found.state, found.cause, found.changed) == ("within", "out_of_range", False)
    assert (found.ratio, found.effective_samples) == (before.ratio, before.effective_samples)
    assert live.heard.out == {"x": 50}
    assert live.heard.alarms == []
    assert live.heard.pooled == [("y", 1, 1.0)] * 300, "nor do they count in the drift of all replicas"
    assert live.send(4e-3, REQUESTS).cause == "none"  # they are not recent any more


def test_a_broken_model_is_a_breach_whatever_comes_out_of_range_beside_it() -> None:
    live = Live()
    live.send(4e-3, 300)
    for _ in range(20):
        live.send(0.2, 9, x=1e6)
        live.send(0.2)
    found = live.comparison.verdict()
    assert (found.state, found.cause) == ("over", "broken")


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("calibration", [CALIBRATION, None])
def test_requests_on_which_fp32_overflows_are_counted_and_not_compared(
    value: float, calibration: Calibration | None
) -> None:
    live = Live(calibration)
    live.send(4e-3, 300)
    before, drifts = live.comparison.verdict(), len(live.heard.drifts)
    for answered in ([[1.0, 3e38]], [[math.nan, math.inf]], [[9.0, value]]):
        live.comparison.observe({"y": np.array([[1.0, value]])}, sample({"y": np.array(answered)}), live.heard)
    assert live.comparison.verdict() == before
    assert (len(live.heard.drifts), live.heard.nonfinite_references) == (drifts, 3)


def test_what_overflows_in_bf16_alone_is_a_breach() -> None:
    live = Live()
    live.send(4e-3, 300)
    live.comparison.observe({"y": np.array([[3.38e38, 1.0]])}, sample({"y": np.array([[math.inf, 1.0]])}), live.heard)
    assert (live.comparison.verdict().state, live.comparison.verdict().cause) == ("over", "broken")


@pytest.mark.parametrize("drift", [0.2, math.inf])
def test_one_client_of_several_causes_no_breach(drift: float) -> None:
    live = Live()
    for _ in range(100):
        live.send(4e-3, client="honest")
    for _ in range(50):
        live.send(drift, 3, client="hostile")
        found = live.send(4e-3, client="honest")
        assert found.state == "unknown"
    assert found.ratio > 1
    assert found.low == 1


@pytest.mark.parametrize("drift", [0.2, math.inf])
@pytest.mark.parametrize("clients", ["a", "ab", "aaaaaaaaab", "abcdefghij"])
def test_a_broken_model_is_a_breach_with_one_client_or_several(clients: str, drift: float) -> None:
    live, sent = Live(), itertools.cycle(clients)
    for _ in range(300):
        live.send(4e-3, client=next(sent))
    states = [live.send(drift, client=next(sent)).state for _ in range(20)]
    assert states[-1] == "over"
    assert live.comparison.verdict().cause == "broken"


@pytest.mark.parametrize("every", [100, 20])
def test_a_prober_with_small_drift_hides_no_breach_of_a_gateway_that_sends_the_rest(every: int) -> None:
    live, over = Live(), 0
    for number in range(600):
        probes = number % every == 0
        found = live.send(1e-4 if probes else 0.3, client="prober" if probes else "gateway")
        over += found.state == "over" and found.cause == "broken"
    assert over > 200


def test_many_clients_of_one_request_each_are_judged_as_one_would_be() -> None:
    live = Live()
    for number in range(20):
        found = live.send(0.2, client=str(number))
    assert found.state == "over"


def test_inputs_out_of_range_that_do_not_raise_the_drift_are_no_cause() -> None:
    live = Live()
    live.send(4e-3)
    assert live.heard.out == {"x": 0}, "that the input has a range is known before a row is out of it"
    assert live.send(4e-3, 100, x=1e6).cause == "none"
    assert live.heard.out == {"x": 100}


def test_samples_from_before_a_change_no_longer_count() -> None:
    live = Live()
    live.send(4e-3, 300)
    took = live.until(0.2, 50)
    assert live.comparison.verdict().effective_samples == pytest.approx(took, abs=1.1)
    assert live.comparison.verdict().ratio == pytest.approx(20, rel=0.2)
    while live.comparison.verdict().changed:
        live.send(4e-3)
    found = live.send(4e-3, 8)
    assert (found.state, found.cause) == ("within", "none")
    assert found.ratio == pytest.approx(0.4, rel=0.1)


def test_two_destroyed_rows_among_hundreds_may_be_chance_and_are_no_breach() -> None:
    live = Live()
    live.send(4e-3, 300)
    found = live.send(15.0, 2)
    assert (found.state, found.cause) == ("unknown", "none")
    assert found.low > 1
    assert live.send(15.0, 2).state == "over"


def test_a_breach_lasts_until_the_narrow_interval_has_1_in_it() -> None:
    live = Live()
    states = [live.send(1.15e-2 if at < 300 else 0.7e-2, spread=0.3) for at in range(1300)]
    begun = next(at for at, each in enumerate(states) if each.state == "over")
    ended = next(at for at, each in enumerate(states) if at > begun and each.state != "over")
    assert any(each.low > 1 for each in states[:begun])
    assert all(each.low > 1 for each in states[begun:ended])
    assert states[ended].low <= 1
    assert all(each.state != "over" for each in states[ended:])


@pytest.mark.parametrize("seed", range(5))
def test_the_change_that_a_breach_is_does_not_end_it(seed: int) -> None:
    """Most samples stand for common requests; few of these are among the newest, whose weights differ by 5.6."""
    live, random = Live(), np.random.default_rng(seed)

    def send(drift: float) -> DriftVerdict:
        return live.send(drift, probability=0.178 if random.uniform() < 0.617 else 1.0)

    for _ in range(400):
        send(4e-3)
    found = [send(1.0) for _ in range(60)]
    assert found[-1].changed
    states = [each.state for each in found]
    assert states[states.index("over") :] == ["over"] * (60 - states.index("over"))


def test_one_element_that_is_not_finite_is_a_breach_at_once() -> None:
    live = Live()
    live.send(4e-3, 100)
    found = live.send(math.inf)
    assert (found.state, found.cause, found.metric) == ("over", "broken", "relative_l2")
    assert (found.ratio, found.low) == (math.inf, math.inf)
    assert live.heard.ratios["y", "nonfinite"] == (math.inf, math.inf, math.inf)


def test_a_restart_forgets_everything_but_the_expected_drift() -> None:
    live = Live()
    live.send(0.2, 50)
    live.comparison.restart()
    assert live.comparison.verdict() == DriftVerdict.unknown("m", 2)
    assert live.send(4e-3, 50).state == "within"
    assert live.until(0.2, 50) <= 12


@pytest.mark.parametrize("calibration", [None, Calibration({"cuda": {"y": MEASURED}}), Calibration()])
def test_the_expected_drift_is_learned_if_no_spread_was_measured(calibration: Calibration | None) -> None:
    live = Live(calibration)
    live.send(3.0, 20)  # over budget: nothing is learned from these
    live.comparison.restart()
    live.send(4e-3, LEARNING_ROWS - 1)
    assert live.heard.scores == [None] * (LEARNING_ROWS + 19)
    live.send(4e-3, 200)
    assert live.heard.alarms == []
    assert live.heard.scores[-1] is not None
    assert live.until(8e-3, 200) <= 25


def test_each_profile_is_expected_to_drift_as_it_was_measured() -> None:
    twice = Calibration({"cpu": {"y": MEASURED}, "cuda": {"y": [2 * value for value in MEASURED]}})
    comparison, heard = Comparison(SPECS[:1], 0, BUDGET, calibration=twice), Heard()
    for profile, drift in (("cpu", 4e-3), ("cuda", 8e-3)):
        for _ in range(100):
            answered = np.array([[1.0 + drift * math.sqrt(2), 1.0]])
            comparison.observe({"y": np.ones((1, 2))}, sample({"y": answered}, profile=profile), heard)
    assert heard.alarms == []
    assert comparison.verdict().samples == 100


def test_an_output_that_is_no_longer_requested_leaves_the_verdict() -> None:
    comparison, heard = Comparison(SPECS, 0, BUDGET, calibration=CALIBRATION), Heard()
    for _ in range(20):
        comparison.observe({"z": ONES}, sample({"z": 2 * ONES}), heard)
    assert (comparison.verdict().state, comparison.verdict().output) == ("over", "z")
    for _ in range(REQUESTS - 1):
        comparison.observe({"y": ONES}, sample({"y": ONES}), heard)
    assert (comparison.verdict().state, comparison.verdict().output) == ("over", "z")
    comparison.observe({"y": ONES}, sample({"y": ONES}), heard)
    assert (comparison.verdict().state, comparison.verdict().cause) == ("within", "none")


def test_a_reference_output_without_rows_is_an_error() -> None:
    heard = Heard()
    with pytest.raises(ArtifactError, match="the fp32 reference's output 'z' has no rows"):
        Comparison(SPECS, 0, Budget()).observe(
            {"y": ONES, "z": np.ones((0, 2), np.float32)}, sample({"y": ONES, "z": ONES}), heard
        )
    assert heard.drifts == []


def test_without_a_batch_axis_a_request_is_one_row() -> None:
    heard = Heard()
    comparison = Comparison(SPECS[:1], None, BUDGET, calibration=CALIBRATION)
    many = Sample({"x": np.full((4, 3), 9.0)}, {"y": np.ones((4, 2))}, 1, 64, 1.0, "bf16", "cpu")
    comparison.observe({"y": np.ones((4, 2))}, many, heard)
    assert (heard.drifts, heard.out) == ([("y", 1.0)], {"x": 1})


class Sliced:
    """Sends samples of ten scores to a comparison that bounds slice errors."""

    def __init__(self, scales: Mapping[str, list[NDArray[np.float64]]] | None = None) -> None:
        self.heard = Heard()
        spec = TensorSpec("y", "float32", ("batch", 10))
        calibration = Calibration(scales=scales or {})
        budget = Budget.parse(["relative_l2.p99=none"])  # it takes 368 samples
        self.comparison = Comparison((spec,), 0, budget, calibration=calibration, clock=lambda: 5.0)
        self._random = np.random.default_rng(2)

    def send(self, count: int, *, large: float = 0.0, destroyed: int | None = None, width: float = 1.0) -> DriftVerdict:
        """``large`` is added to the first score; the score ``destroyed`` belongs to another request."""
        for _ in range(count):
            reference = 1 + width * self._random.standard_normal((1, 10))
            answered = reference + 1e-3 * self._random.standard_normal((1, 10))
            if destroyed is not None:
                answered[:, destroyed] = 1 + width * self._random.standard_normal()
            for array in (reference, answered):
                array[:, 0] += large
            self.comparison.observe({"y": reference}, sample({"y": answered}), self.heard)
        return self.comparison.verdict()


def test_a_destroyed_score_beside_a_large_one_is_over_budget_and_named() -> None:
    """The norm over the sample sees a thousandth of its budget."""
    live = Sliced()
    assert live.send(100, large=1e4).state == "within"
    verdict = live.send(200, large=1e4, destroyed=7)
    assert (verdict.state, verdict.metric) == ("over", "slice_error")
    assert live.heard.slices["y"] == (1, 7)
    assert live.heard.ratios["y", "relative_l2"][0] < 0.1


def test_an_infinite_reference_that_bf16_lost_is_over_budget_at_once() -> None:
    """The golden samples have infinite outputs as well: the model masks."""
    reference = np.array([[1.0, -np.inf]])
    heard = Heard()
    comparison = Comparison(SPECS[:1], 0, Budget(), calibration=Calibration(infinite=frozenset({"y"})))
    comparison.observe({"y": reference}, sample({"y": np.array([[1.0, -3.4e38]])}), heard)
    assert heard.ratios["y", "nonfinite"][0] == math.inf
    assert comparison.verdict().state == "over"


def test_clients_that_always_send_the_same_input_are_no_breach() -> None:
    """Their outputs hardly vary, and the conversion's samples showed how much they can."""
    assert Sliced().send(100, width=1e-3).state == "over"
    assert Sliced({"y": [np.ones(10)]}).send(100, width=1e-3).state == "within"


def test_a_mended_score_is_forgotten_when_precision_changes() -> None:
    live = Sliced()
    live.send(50, destroyed=3)
    live.comparison.restart()
    assert live.send(50).state == "within"


def test_one_number_per_row_is_judged_by_its_variation_alone() -> None:
    """A relative error means nothing for a value near zero."""
    heard = Heard()
    comparison = Comparison((TensorSpec("y", "float32", ("batch",)),), 0, Budget())
    random = np.random.default_rng(3)
    for _ in range(50):
        value = random.standard_normal(1)
        comparison.observe({"y": value}, sample({"y": value + 0.02}), heard)
    assert {metric for _, metric in heard.ratios} == {"nonfinite", "slice_error"}
    assert comparison.verdict().state == "within"
