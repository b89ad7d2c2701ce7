import math
import time
from collections.abc import Mapping

import numpy as np
import pytest
from driftmetrics import DriftMetrics
from numpy.typing import NDArray

from bf16kit.drift.measurements import InputRange
from bf16kit.drift.metrics import Budget
from bf16kit.messages.errors import ArtifactError
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.service.contract import Array
from bf16kit.service.drift.comparison import Comparison
from bf16kit.service.drift.contract import DriftVerdict
from bf16kit.service.drift.detector import LEARNING_ROWS, Calibration
from bf16kit.service.drift.recent import REQUESTS
from bf16kit.service.drift.sampler import Sample

SPECS = (TensorSpec("y", "float32", ("batch", 2), "embedding"), TensorSpec("z", "float32", ("batch", 2), "logits"))
ONES = np.ones((1, 2), np.float32)
BUDGET = Budget.from_dict({"relative_l2": 1e-2, "nonfinite": 0.0})
POOLED = {"output": "y", "metric": "relative_l2", "moment": "weight"}
MEASURED = tuple(float(value) for value in 4e-3 * np.exp(0.1 * np.random.default_rng(0).standard_normal(200)))
CALIBRATION = Calibration({"cpu": {"y": MEASURED}}, {"x": InputRange(low=-1.0, high=1.0)})


class Live:
    """Sends samples of one row and one output to a comparison, with the drift that a test sets."""

    def __init__(self, calibration: Calibration | None = CALIBRATION, budget: Budget = BUDGET) -> None:
        self.metrics = DriftMetrics(*SPECS[:1])
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
            self.comparison.observe({"y": np.ones((1, 2))}, sent, self.metrics.model)
        return self.comparison.verdict()


def sample(
    outputs: dict[str, Array], x: float = 0.5, probability: float = 1.0, profile: str = "cpu", client: str = ""
) -> Sample:
    rows = len(next(iter(outputs.values())))
    return Sample({"x": np.full((rows, 3), x, np.float32)}, outputs, rows, 64, probability, "bf16", profile, client)


def test_a_verdict_is_as_new_as_its_sample_although_the_wall_clock_was_set_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The serving process compares it with the time of the load, which another process read."""
    loaded, now = time.monotonic(), time.time
    monkeypatch.setattr(time, "time", lambda: now() - 86_400)
    comparison = Comparison(SPECS[:1], 0, BUDGET)
    comparison.observe({"y": ONES}, sample({"y": ONES}), DriftMetrics(*SPECS[:1]).model)
    assert loaded <= comparison.verdict().at <= time.monotonic()


# --- what is measured -------------------------------------------------------------------------------------------------


def test_the_mean_is_that_of_all_rows_served_and_not_of_the_sampled_rows() -> None:
    live = Live(budget=Budget.from_dict({"relative_l2": 1.0}))
    for _ in range(50):
        live.send(0.1, spread=0, probability=0.01)
        live.send(0.9, spread=0, probability=1.0)
    ratio, low, high = live.metrics.ratio("relative_l2")
    assert ratio == pytest.approx((100 * 0.1 + 0.9) / 101, rel=0.02)
    assert low < ratio < high
    assert live.metrics.rows() == live.metrics.value("pooled_total", **POOLED) == 50 * 101


@pytest.mark.parametrize(("shape", "axis", "rows"), [((4, 2), None, 1), ((2,), 1, 2)])
def test_without_rows_a_request_is_judged_as_a_whole(shape: tuple[int, ...], axis: int | None, rows: int) -> None:
    """The model has no batch axis, or its output has none."""
    spec, y = TensorSpec("y", "float32", shape, "other"), np.ones(shape)
    metrics, comparison = DriftMetrics(spec), Comparison([spec], axis, BUDGET, calibration=CALIBRATION)
    sent = Sample({"x": np.array([[0.0, 99.0]])}, {"y": 2 * y}, rows, 64, 1.0, "bf16", "cpu")
    for _ in range(20):
        comparison.observe({"y": y}, sent, metrics.model)
    assert (metrics.rows(), metrics.value("out_of_range_total", input="x")) == (20, 20)
    assert comparison.verdict().cause == "out_of_range"


def test_a_reference_output_without_rows_is_an_error_and_nothing_of_the_request_counts() -> None:
    metrics, expected = DriftMetrics(*SPECS), {"y": ONES, "z": np.ones((0, 2), np.float32)}
    with pytest.raises(ArtifactError, match="the fp32 reference's output 'z' has no rows"):
        Comparison(SPECS, 0, Budget()).observe(expected, sample({"y": ONES, "z": ONES}), metrics.model)
    assert metrics.rows("y") == 0


# --- the state --------------------------------------------------------------------------------------------------------


def test_the_metrics_tell_the_verdict() -> None:
    live = Live(budget=Budget.from_dict({"relative_l2": 3e-3}))
    assert live.comparison.verdict() == DriftVerdict("m", 2)
    few = live.send(2e-3, 7)
    assert (few.state, few.high, few.samples, few.at) == ("unknown", math.inf, 7, 5.0)
    assert live.send(2e-3, 50).state == "within"
    assert [live.metrics.value(f"{state}_budget") for state in ("within", "over")] == [1, 0]
    over = live.send(4e-3, 300)
    assert (over.state, over.cause, over.changed) == ("over", "rounding", False)
    assert [live.metrics.value(f"{state}_budget") for state in ("within", "over")] == [0, 1]
    assert live.metrics.value("cause", cause="rounding") == 1
    assert over.effective_samples == live.metrics.value("effective_samples", output="y")


@pytest.mark.long
def test_a_tail_that_the_mean_does_not_show_is_over_the_default_budget_once_it_can_be_established() -> None:
    """A p99 takes 368 samples to confirm. Until then its estimate counts."""
    live = Live(budget=Budget())
    assert live.send(3.75e-3, 60).state == "within"
    assert live.metrics.ratio("relative_l2.p99")[2] == math.inf
    assert live.send(0.15, 2).state == "unknown"
    assert live.send(3.75e-3, 1200).state == "within"
    assert live.metrics.ratio("relative_l2.p99")[2] <= 1
    for _ in range(40):
        live.send(3.75e-3, 29)
        verdict = live.send(0.15)
    assert (verdict.state, verdict.metric) == ("over", "relative_l2.p99")
    assert live.metrics.ratio("relative_l2")[2] < 1


# --- changes ----------------------------------------------------------------------------------------------------------


def test_the_expected_drift_is_learned_if_no_spread_was_measured() -> None:
    live = Live(None)
    live.send(3.0, 20)  # over budget: nothing is learned from these
    live.comparison.restart()
    live.send(4e-3, LEARNING_ROWS - 1)
    assert live.metrics.value("change_score", output="y") is None
    assert not live.send(4e-3, 200).changed
    assert live.metrics.value("change_score", output="y") is not None
    assert live.send(8e-3, 25).changed


# --- what does not count against the model ----------------------------------------------------------------------------


@pytest.mark.long
def test_inputs_out_of_range_are_judged_apart_and_are_no_breach() -> None:
    live = Live()
    before = live.send(4e-3, 300)
    found = live.send(0.2, 50, x=1e6)
    assert (found.state, found.cause, found.changed) == ("within", "out_of_range", False)
    assert (found.ratio, found.effective_samples) == (before.ratio, before.effective_samples)
    assert live.metrics.value("pooled_total", **POOLED) == 300, "nor do they count in the fleet"
    assert live.send(4e-3, REQUESTS).cause == "none"  # they are not recent any more


def test_an_infinite_reference_that_bf16_lost_is_over_budget_at_once() -> None:
    """The golden samples have infinite outputs as well: the model masks."""
    metrics = DriftMetrics(SPECS[0])
    comparison = Comparison(SPECS[:1], 0, Budget(), calibration=Calibration(infinite=frozenset({"y"})))
    comparison.observe({"y": np.array([[1.0, -np.inf]])}, sample({"y": np.array([[1.0, -3.4e38]])}), metrics.model)
    assert metrics.ratio("nonfinite")[0] == math.inf
    assert comparison.verdict().state == "over"


@pytest.mark.parametrize("drift", [0.2, math.inf])
def test_one_client_of_several_causes_no_breach(drift: float) -> None:
    live = Live()
    live.send(4e-3, 100, client="honest")
    for _ in range(50):
        live.send(drift, 3, client="hostile")
        found = live.send(4e-3, client="honest")
        assert found.state == "unknown"
    assert found.ratio > 1
    assert found.low == 1


def test_one_client_of_many_causes_no_breach_with_large_values_of_little_drift() -> None:
    """Each of the five others has more relative drift; its values, thirty times as large, break max_abs alone."""
    live = Live(budget=Budget.from_dict({"relative_l2": 1e-2, "max_abs": 0.1}))
    for _ in range(12):
        for client in "abcde":
            live.send(4e-3, client=client)
    large = sample({"y": np.array([[30 * (1 + 4e-3 * math.sqrt(2)), 30.0]])}, client="f")
    live.comparison.observe({"y": np.full((1, 2), 30.0)}, large, live.metrics.model)
    found = live.comparison.verdict()
    assert (found.state, found.metric, found.low) == ("unknown", "max_abs", 1.0)
    assert found.ratio > 1


def test_the_client_with_an_infinite_row_is_the_one_whose_breach_it_is() -> None:
    """Another client's rows are over the bound too, but without the first one the mean is within it."""
    live = Live()
    for _ in range(10):
        live.send(4e-3, 10, client="small")
        live.send(1.5e-2, client="large")
    found = live.send(math.inf, client="infinite")
    assert (found.state, found.ratio, found.low) == ("unknown", math.inf, 1.0)


def test_exact_rows_do_not_hide_whose_breach_it_is() -> None:
    """A row that is exact has +inf dB and stands for neither good nor bad ones."""
    live = Live(budget=Budget.from_dict({"sqnr_db": 40.0}))
    for _ in range(30):
        live.send(4e-3, client="good")
        live.send(1.5e-2, client="middling")
        live.send(0.0, client="bad")
        found = live.send(100.0, 1, client="bad")
    assert (found.state, found.low) == ("unknown", 1.0)
    assert found.ratio > 1


def test_a_prober_with_small_drift_hides_no_breach_of_a_gateway_that_sends_the_rest() -> None:
    live = Live()
    for _ in range(10):
        live.send(1e-4, client="prober")
        found = live.send(0.3, 19, client="gateway")
    assert (found.state, found.cause) == ("over", "broken")


# --- slices, and outputs of one number --------------------------------------------------------------------------------


class Sliced:
    """Sends samples of ten scores to a comparison that bounds slice errors."""

    def __init__(self, scales: Mapping[str, list[NDArray[np.float64]]] | None = None) -> None:
        spec = TensorSpec("y", "float32", ("batch", 10))
        self.metrics = DriftMetrics(spec)
        calibration = Calibration(scales=scales or {})
        budget = Budget.parse(["relative_l2.p99=none"])  # it takes 368 samples
        self.comparison = Comparison((spec,), 0, budget, calibration=calibration)
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
            self.comparison.observe({"y": reference}, sample({"y": answered}), self.metrics.model)
        return self.comparison.verdict()


def test_a_destroyed_score_beside_a_large_one_is_over_budget_and_named() -> None:
    """The norm over the sample sees a thousandth of its budget."""
    live = Sliced()
    assert live.send(100, large=1e4).state == "within"
    verdict = live.send(200, large=1e4, destroyed=7)
    assert (verdict.state, verdict.metric) == ("over", "slice_error")
    assert [live.metrics.value(f"worst_slice_{what}", output="y") for what in ("axis", "index")] == [1, 7]
    assert live.metrics.ratio("relative_l2")[0] < 0.1


def test_clients_that_always_send_the_same_input_are_no_breach() -> None:
    """Their outputs hardly vary, and the conversion's samples showed how much they can."""
    assert Sliced().send(100, width=1e-3).state == "over"
    assert Sliced({"y": [np.ones(10)]}).send(100, width=1e-3).state == "within"


def test_a_mended_score_is_forgotten_when_precision_changes() -> None:
    live = Sliced()
    live.send(50, destroyed=3)
    live.comparison.restart()
    assert live.send(50).state == "within"


class Ranker:
    """Sends samples of one score each to a comparison that knows the errors of 64 calibrated scores."""

    def __init__(self, *dims: int) -> None:
        """``dims`` follow the batch axis: none, or one of size 1."""
        self._shape = (1, *dims)
        self._random = np.random.default_rng(2)
        errors = tuple(0.002 * np.abs(self._random.standard_normal(64)))
        known = Calibration({"cpu": {"score": errors}}, scalars=frozenset({"score"}))
        spec = TensorSpec("score", "float32", ("batch", *dims))
        self.metrics = DriftMetrics(spec)
        self._comparison = Comparison([spec], 0, Budget(), calibration=known)

    def send(self, count: int, *, error: float = 0.002, spread: float = 1.0) -> DriftVerdict:
        for score, wrong in zip(*self._random.standard_normal((2, count)), strict=True):
            expected = np.full(self._shape, spread * score)
            answered = sample({"score": expected + error * wrong})
            self._comparison.observe({"score": expected}, answered, self.metrics.model)
        return self._comparison.verdict()


@pytest.mark.parametrize("dims", [(), (1,)])
def test_scores_near_0_are_no_drift_of_a_ranker(dims: tuple[int, ...]) -> None:
    """Their relative errors are large, and their cosine distance is 0 or 2."""
    ranker = Ranker(*dims)
    assert ranker.send(200).state == "within"
    found = ranker.send(600, spread=0.01)
    assert (found.state, found.cause, found.changed) == ("within", "none", False)
    assert {metric for _, metric in ranker.metrics.judged_bounds()} == {"nonfinite", "slice_error"}
    assert ranker.metrics.value("pooled_total", **POOLED | {"output": "score"}) == 0


def test_a_damaged_ranker_is_over_its_budget_and_broken() -> None:
    ranker = Ranker(1)
    ranker.send(200)
    found = ranker.send(100, error=1.0)
    assert (found.state, found.metric, found.cause) == ("over", "slice_error", "broken")
    assert ranker.metrics.value("changes_total", output="score") == 1
