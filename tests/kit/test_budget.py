"""The budget: read from text, judged on a summary, compared as a ratio; and the verdict on each profile."""

import math

import pytest
import reported

from bf16kit.artifact.manifest import SINCE_SLICES, DriftEntry, Manifest
from bf16kit.converter.report.figures import Figures
from bf16kit.drift.budget import Budget
from bf16kit.drift.metrics import DriftSummary, SampleDrift
from bf16kit.drift.verdicts import format_budget_ratio, golden_budget
from bf16kit.messages.errors import UsageError


def summary(relative_l2: float = 0.0, *, max_abs: float = 0.0, matches: int = 1, bad: int = 0) -> DriftSummary:
    exact = SampleDrift(0.0, 0.0, 0.0, 60.0, 1, 1, 0)
    return DriftSummary.of([exact, SampleDrift(relative_l2, 0.0, max_abs, 20.0, matches, 1, bad)])


class TestReading:
    def test_the_default_budget(self) -> None:
        norms = {"relative_l2": 1.5e-2, "relative_l2.p99": 0.1, "cosine_distance": 5e-4}
        assert Budget().as_dict() == norms | {"top1_agreement": 0.99, "nonfinite": 0.0, "slice_error": 0.5}

    def test_texts_change_the_default(self) -> None:
        budget = Budget.parse(["relative_l2=1e-2", " max_abs = 3 ", "nonfinite=none"])
        bounds = [budget.bound(name) for name in ("relative_l2", "max_abs", "nonfinite", "top1_agreement")]
        assert bounds == [1e-2, 3, None, 0.99]
        assert budget.stated == {"relative_l2", "max_abs"}
        assert Budget.parse(["relative_l2=1", "relative_l2=2"]).bound("relative_l2") == 2

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("relative_l2", "expected METRIC=NUMBER"),
            ("relative_l2=small", "'small' is not a number"),
            ("l2=1", "unknown metric 'l2'; metrics are relative_l2"),
            ("relative_l2=-1", "out of range"),
            ("relative_l2=nan", "out of range"),
            ("max_abs=inf", "out of range"),
            ("top1_agreement=99", "between 0 and 1"),
            ("relative_l2.p98=1", "unknown quantile 'p98'; quantiles are p50, p99, worst"),
            ("relative_l2.=1", "unknown quantile ''"),
            ("top1_agreement.p99=1", "one number for all samples and has no quantiles"),
            ("relative_l2.p99=-1", "out of range"),
        ],
    )
    def test_a_bad_text_is_rejected_with_a_reason(self, text: str, message: str) -> None:
        with pytest.raises(UsageError, match=message):
            Budget.parse([text])

    def test_a_budget_read_from_a_manifest_equals_the_one_written(self) -> None:
        budget = Budget.parse(["relative_l2=none", "sqnr_db=-3"])
        assert Budget.from_dict(budget.as_dict()) == budget


class TestJudging:
    def test_a_breach_states_the_output_the_metric_and_the_values(self) -> None:
        assert Budget().breaches("y", summary(relative_l2=0.03)) == []  # the mean is at its bound
        (breach,) = Budget().breaches("y", summary(relative_l2=0.05))
        assert str(breach) == "output 'y': relative_l2 is 0.025, the budget allows at most 0.015"

    def test_agreement_and_sqnr_are_bounded_from_below(self) -> None:
        budget = Budget.parse(["sqnr_db=50"])
        assert [str(b) for b in budget.breaches("y", summary(matches=0))] == [
            "output 'y': sqnr_db is 40, the budget allows at least 50",
            "output 'y': top1_agreement is 0.5, the budget allows at least 0.99",
        ]

    def test_the_worst_max_abs_and_every_nonfinite_element_count(self) -> None:
        breaches = Budget.parse(["max_abs=1"]).breaches("y", summary(max_abs=2, bad=1))
        assert [(b.metric, b.measured) for b in breaches] == [("max_abs", 2), ("nonfinite", 1)]

    def test_a_quantile_is_bounded_beside_the_mean(self) -> None:
        spread = DriftSummary.of([SampleDrift(0.0001 * i, 0.0, 0.0, float(i), 0, 0, 0) for i in range(1, 101)])
        assert Budget().breaches("y", spread) == []
        budget = Budget.parse(["relative_l2.p99=9e-3", "relative_l2.p50=5e-3", "relative_l2.worst=1e-2"])
        assert [(b.metric, b.measured) for b in budget.breaches("y", spread)] == [("relative_l2.p99", 0.0099)]
        assert budget.ratio("relative_l2.p99", 0.018) == pytest.approx(2)
        assert [b.metric for b in Budget.parse(["sqnr_db.worst=20"]).breaches("y", spread)] == ["sqnr_db.worst"]


@pytest.mark.parametrize(
    ("name", "bound", "measured", "ratio"),
    [
        ("relative_l2", 1.5e-2, 0.003, 0.2),
        ("top1_agreement", 0.99, 0.98, 2),
        ("sqnr_db", 30.0, 42.5, 10**-0.625),  # of noise amplitudes
        ("sqnr_db", 40.0, 20.0, 10),
        ("max_abs", 2.0, 5.0, 2.5),
        ("nonfinite", 0.0, 0.0, 0),
        ("top1_agreement", 1.0, 1.0, 0),
    ],
)
def test_drift_is_a_ratio_to_its_bound_and_is_computed_back_from_it(
    name: str, bound: float, measured: float, ratio: float
) -> None:
    budget = Budget({name: bound})
    assert budget.ratio(name, measured) == pytest.approx(ratio)
    assert budget.measured(name, ratio) == pytest.approx(measured)


def test_a_ratio_that_is_infinite_zero_or_of_nothing_bounded_has_no_measured_value() -> None:
    for name, measured, ratio in (("nonfinite", 1, math.inf), ("relative_l2", math.inf, math.inf), ("max_abs", 9, 0)):
        assert Budget().ratio(name, measured) == ratio
    assert Budget().measured("nonfinite", math.inf) is None
    sqnr = Budget({"sqnr_db": 30.0})
    assert (sqnr.ratio("sqnr_db", math.inf), sqnr.ratio("sqnr_db", -math.inf)) == (0, math.inf)
    assert sqnr.measured("sqnr_db", 0.0) is None
    assert Budget({"top1_agreement": 1.0}).measured("top1_agreement", 1e9) is None
    assert Budget({}).measured("cosine_distance", 0.5) is None


def _figures(manifest: Manifest) -> list[str]:
    found = Figures(manifest, manifest.files)
    return [found.headline, *(verdict.sentence for verdict in found.verdicts)]


def test_a_verdict_is_one_sentence_with_the_bound_that_is_nearest() -> None:
    headline, cpu, cuda = _figures(reported.manifest())
    assert headline == "cpu and cuda keep within the drift budget."
    assert cpu.startswith("cpu is within budget: relative_l2.p99 of logits is 0.0028, at most 0.02 is allowed (14% of")
    assert "; measured on 128 samples of calibration.npz; judged by the older measure" in cpu
    assert "emulated on the CPU, on 128 samples" in cuda
    headline, cpu, cuda = _figures(reported.manifest(over=True))
    assert headline == "cuda is over the drift budget."
    assert "within" in cpu
    assert cuda.startswith("cuda is over budget: relative_l2.p99 of logits is")


def test_a_lower_bound_is_worded_as_one_and_what_was_not_judged_is_said() -> None:
    stats = {"top1_agreement": {"mean": 0.5, "rows": 20.0}, "slice_error": {"worst": 0.1, "judged": 3.0, "slices": 5.0}}
    entry = DriftEntry(samples=1, source="s", outputs={"y": stats})
    manifest = reported.manifest().amended(drift={"cpu": entry}, schema_version=SINCE_SLICES)
    headline, cpu = _figures(manifest)
    assert headline == "cpu is over the drift budget."
    assert cpu == (
        "cpu is over budget: top1_agreement of y is 0.5, at least 0.99 is required (50 × the budget);"
        " measured on 1 sample of s; not judged: 2 of 5 slices of y, zero, at fp32 noise or in too few samples;"
        " top1_agreement of y was judged on 20 rows, its bound needs 100"
    )


def test_golden_samples_of_earlier_converters_are_not_judged_by_their_agreement() -> None:
    """These let the agreement of a few rows pass by its upper confidence limit."""
    for version, bound in ((SINCE_SLICES - 1, None), (SINCE_SLICES, 0.99)):
        manifest = reported.manifest().model_copy(update={"schema_version": version})
        assert golden_budget(manifest, Budget()).bound("top1_agreement") == bound


def test_without_a_bound_drift_is_within_and_a_lack_of_measurements_is_reported() -> None:
    headline, cpu, _ = _figures(reported.manifest().amended(budget={}))
    assert headline == "cpu and cuda keep within the drift budget."
    assert "nothing is bounded" in cpu
    assert _figures(reported.manifest().amended(drift={})) == ["No drift was measured."]


def test_shares_of_a_budget() -> None:
    shares = [format_budget_ratio(used) for used in (0.0, 0.001, 0.5, 1.97, 40.0, 1615.3, math.inf)]
    assert shares == ["0%", "< 1%", "50%", "197%", "40 ×", "1,615 ×", "∞ ×"]
